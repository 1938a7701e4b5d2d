"""Dynamo's capture of one whole graph."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()

#: Names of functions and methods that return the tensor to which they write. ``operator.and_`` and its like do not.
_WRITES_BY_NAME = r"i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)|(?!(and|or|not|is)_$)[a-z]\w*_"


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

    ``self.count += 1`` of a tensor is in the graph: it writes in place, and assigns what the attribute holds already.
    An attribute that ends as it was, such as a flag that is set and reset, is no change.
    :func:`lost_changes` reads the error. If torch words its warning otherwise, it warns, and the changes are lost.
    """
    from torch._dynamo.side_effects import SideEffects

    modified = SideEffects._get_modified_vars

    def lost(effects: SideEffects) -> list[Any]:
        return [variable for variable in modified(effects) if not _holds_the_same(variable, effects)]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "While .*, we found certain side effects happened", UserWarning)
        SideEffects._get_modified_vars = lost  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            SideEffects._get_modified_vars = modified  # type: ignore[method-assign]


def _holds_the_same(variable: Any, effects: Any) -> bool:
    """Whether an object, or a module's dict of buffers, is assigned only what it has, or results of writes to it."""
    if getattr(variable, "source", None) is None:
        return False
    name = _name(variable.source)
    attributes = effects.store_attr_mutations.get(variable, {})
    changed = {key: value for key, value in attributes.items() if not _is_again(value, variable, key)}
    assigned = {f"{name}.{key}": value for key, value in changed.items()}
    if name.endswith("._buffers"):
        assigned |= {f"{name}[{key.vt.as_python_constant()!r}]": value for key, value in variable.items.items()}
    return bool(attributes or assigned) and all(_is_written(value, place) for place, value in assigned.items())


def _is_again(value: Any, owner: Any, name: str) -> bool:
    """Whether ``value`` is the constant that the attribute ``name`` of an object has outside of the capture."""
    if not value.is_python_constant():
        return False
    before = getattr(getattr(owner, "value", None), name, _MISSING)
    return type(before) is type(value.as_python_constant()) and bool(before == value.as_python_constant())


def _is_written(value: Any, place: str) -> bool:
    """Whether ``value`` is the tensor at ``place``, or the result of writes to it in place."""
    if getattr(value, "source", None) is not None:
        return _name(value.source) == place
    node = value.as_proxy().node if value.is_tensor() else None
    while node is not None and node.op.startswith("call_"):
        name = getattr(node.target, "__name__", node.target)
        node = node.args[0] if re.fullmatch(_WRITES_BY_NAME, name) and node.args else None
    return node is not None and "grapharg" in node.meta and _name(node.meta["grapharg"].source) == place


def _name(source: Any) -> str:
    return _attribute(source.name() if callable(source.name) else source.name)


def _attribute(name: str) -> str:
    return re.sub(r"\.__dict__\['(\w+)'\]", r".\1", name)


def lost_changes(error: Exception) -> list[str]:
    """Return what the program changes, such as ``self.cache``, if ``error`` is of :func:`raising_lost_changes`."""
    found = re.search(r"we found certain side effects happened.*double check: \[(.*)\]", str(error))
    if found is None:
        return []
    names = [re.sub(r"^[LG]\['(\w+)'\]", r"\1", name) for name in re.findall(r'"(.*?)"', found[1])]
    return list(map(_attribute, names))
