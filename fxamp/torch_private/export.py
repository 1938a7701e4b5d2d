"""Dynamo's capture of one whole graph."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def returning_nothing() -> Iterator[None]:
    """Let graphs that are captured inside have no results: a program may only write, or return a shape.

    They may have no inputs either, where they read the module's tensors themselves. torch writes invalid Python for
    both. Breaks loudly.
    """
    from torch._dynamo import functional_export

    codegen = functional_export._DynamoBytecodeCodeGen

    class _Codegen(codegen):  # type: ignore[misc, valid-type]
        def gen_fn_def(self, free_vars: list[str], *others: Any, **options: Any) -> str:
            definition: str = super().gen_fn_def(free_vars or ["*_"], *others, **options)
            return definition

        def generate_output(self, output_args: Any, **options: Any) -> str:
            code: str = super().generate_output(output_args, **options)
            return code if output_args else code.replace("((,), ", "((), ")

    functional_export._DynamoBytecodeCodeGen = _Codegen  # type: ignore[misc]
    try:
        yield
    finally:
        functional_export._DynamoBytecodeCodeGen = codegen  # type: ignore[misc]


@contextmanager
def raising_lost_changes() -> Iterator[None]:
    """Raise an error inside where torch would warn that a captured program changes objects that its graph lacks.

    :func:`lost_changes` reads the error. If torch words its warning otherwise, it warns, and the changes are lost.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "While .*, we found certain side effects happened", UserWarning)
        yield


def lost_changes(error: Exception) -> list[str]:
    """Return what the program changes, such as ``self.cache``, if ``error`` is of :func:`raising_lost_changes`."""
    found = re.search(r"we found certain side effects happened.*double check: \[(.*)\]", str(error))
    if found is None:
        return []
    names = [re.sub(r"^[LG]\['(\w+)'\]", r"\1", name) for name in re.findall(r'"(.*?)"', found[1])]
    return [re.sub(r"\.__dict__\['(\w+)'\]", r".\1", name) for name in names]
