"""How a program takes its inputs and gives its results: by position, by name, in structures, with parts left out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Border:
    """Python of one way, to be formatted.

    ``parameters`` of ``forward``, which begins with ``reading`` if there are inputs and returns ``returned``; the
    ``arguments`` of its call; ``tensors``: all of its ``results`` in order. ``record`` makes the structures ``Batch``
    and ``Results``: what stands before each class, and after its name.

    In all of them ``{names}`` are inputs or results, each with a comma after it, and ``{keywords}`` the same as keyword
    arguments; ``{read}`` are the inputs as attributes of ``batch``.
    """

    parameters: str
    returned: str
    arguments: str
    tensors: str = "results"
    reading: str = ""
    record: tuple[str, str] | None = None

    def classes(self, inputs: Sequence[str], results: Sequence[str]) -> Iterator[str]:
        """The lines of the structures."""
        if self.record is None:
            return
        before, bases = self.record
        for name, fields in (("Batch", inputs), ("Results", [f"r{at}" for at in range(len(results))])):
            yield from filter(None, (before, f"class {name}{bases}:"))
            yield from (*(f"    {field}: object" for field in fields), "    pass", "", "")

    def written(self, text: str, names: Sequence[str]) -> str:
        """``text`` for these inputs or results."""
        keywords = "".join(f"{name}={name}, " for name in names)
        read = "".join(f"batch.{name}, " for name in names)
        return text.format(names="".join(f"{name}, " for name in names), keywords=keywords, read=read)


#: Every way by name; the plainest first.
BORDERS = {
    "positions": Border("self, {names}", "[{names}]", "{names}"),
    "dict": Border(
        "self, batch", "dict(enumerate([{names}]))", "dict({keywords})", "results.values()", "{names} = batch.values()"
    ),
    "named tuple": Border(
        "self, batch", "Results({names})", "Batch({names})", reading="{names} = batch", record=("", "(NamedTuple)")
    ),
    "dataclass": Border(
        "self, batch", "Results({names})", "Batch({names})", "vars(results).values()", "{names} = {read}",
        ("@dataclass", ""),
    ),
    "keywords": Border("self, *, {names}mask=None, factor=1.0", "({names})", "{keywords}"),
    "nested": Border(
        "self, batch, mask=None", '{{"all": [None, ({names})], "factor": 2}}', '{{"all": [({names}), None]}}, None',
        'results["all"][1]', '{names} = batch["all"][0]',
    ),
}  # fmt: skip

#: Those that :func:`fxamp.rewrite` takes: inputs have positions, and no class that pytree does not know.
POSITIONAL = tuple(name for name in BORDERS if name not in ("keywords", "dataclass"))
