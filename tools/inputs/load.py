"""Load any input of fxamp-show as a Document; its content determines its kind.

    graph text              read; with a policy it is rebuilt on FakeTensors, none of it is run
    fx_graph_runnable.py    the same; its intermediate types are found on FakeTensors; run only if trusted
    model.py                run, to get the model and its inputs; the model is traced on FakeTensors
    .pt2                    loaded by torch.export, which runs code that it holds; only if trusted

Torch is imported where it is needed, not here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fxamp.errors import ListingError
from fxamp.graph_text import Document, Listing
from fxamp.policy.model.site import KEPT
from fxamp.tools.common.output import notice
from fxamp.tools.common.silence import in_one_line, quiet
from fxamp.tools.inputs.apply import Request, choose, is_lowered, refuse
from fxamp.tools.inputs.kinds import existing, kind_of

if TYPE_CHECKING:
    from fxamp.tools.inputs.prepare import ProgramGraph

_T = TypeVar("_T")

__all__ = ["Request", "load", "prepare"]


def load(path: str, request: Request) -> Document:
    """Load ``path``. A graph's text is only read, unless ``request`` names a policy or a device.

    Raises ListingError, OptionError, PolicyError or BannedOpError with a one-line message.
    """
    file = existing(path)
    kind = kind_of(file)
    if kind == "graph" and request.plain:
        return _read(file)
    if kind == "runnable" and request.plain:
        return _run(file, request) if request.trust else _with_values(_read(file), file)
    if not request.plain:
        choose(request, "")  # report a mistake in it before a program is run
    prepared = prepare(path, request)
    graphs: list[Listing] = []
    notes: list[str] = []
    for one in prepared:
        policy, why = choose(request, one.device)
        with quiet(), in_one_line(f"{file}: {one.name} cannot be rewritten"):
            graphs.append(one.listing(policy, why, request.kept or policy.has_rules_for(KEPT)))
        notes += one.warnings
        notes += [f"{file}: {one.name} needs numbers for symbolic sizes; assumed: {taken}" for taken in one.fixed()]
    return Document(tuple(graphs), tuple(dict.fromkeys(notes)))


def prepare(path: str, request: Request) -> "list[ProgramGraph]":
    """Return the captured graphs of ``path``, to which policies can be applied one after another.

    Raises ListingError, for example for a graph to which no policy can be applied.
    """
    file = existing(path)
    with quiet(), in_one_line(f"{file}: its graphs cannot be rebuilt"):
        return _PREPARE[kind_of(file)](file, request)


def _read(file: str) -> Document:
    from fxamp.graph_text.parse import read_file

    return read_file(file)


def _with_values(document: Document, file: str) -> Document:
    """Return ``document`` with the types that a runnable's text does not contain."""
    from fxamp.tools.inputs.build import fill_values

    with quiet(), in_one_line(f"{file}: the types of its values cannot be found"):
        graphs = [_or_trust(partial(fill_values, listing, file)) for listing in document.graphs]
    return replace(document, graphs=tuple(graphs))


def _or_trust(build: Callable[[], _T]) -> _T:
    """Build from a runnable's text; if the text is not enough, raise an error that suggests ``--trust``."""
    try:
        return build()
    except ListingError as error:
        raise ListingError(f"{error}; accepted with --trust, which runs the file") from error


def _readable(file: str) -> Document:
    """Return the contents of ``file`` if a policy can be applied to it."""
    document = _read(file)
    for listing in document.graphs:
        refuse(listing, file)
    return document


def _prepare_read(document: Document, file: str) -> "list[ProgramGraph]":
    from fxamp.tools.inputs.build import prepare_listing

    prepared = [prepare_listing(listing, file) for listing in document.graphs]
    notes = [
        *document.warnings,
        *(_LOWERED.format(file, listing.name) for listing in document.graphs if is_lowered(listing)),
    ]
    return [replace(one, warnings=(*one.warnings, *notes)) for one in prepared]


_LOWERED = (
    "{}: {} is at AOTAutograd's level, where linear, layer_norm, cross_entropy and others are decomposed; fxamp "
    "decides before that, so its own choices may differ"
)


def _run(file: str, request: Request) -> Document:
    """Return the graph of a runnable by running it, without a policy."""
    from fxamp.tools.inputs.executed import run_runnable

    with quiet(), in_one_line(f"{file}: its graph cannot be listed"):
        return Document((run_runnable(file, _notice(request)).plain_listing(),))


def _prepare_runnable(file: str, request: Request) -> "list[ProgramGraph]":
    if not request.trust:
        document = _readable(file)
        return _or_trust(partial(_prepare_read, document, file))
    from fxamp.tools.inputs.executed import run_runnable

    prepared = run_runnable(file, _notice(request))
    refuse(prepared.plain_listing(), file)
    return [prepared]


def _prepare_model(file: str, request: Request) -> "list[ProgramGraph]":
    from fxamp.tools.inputs.model_file import program

    defined = program(file, _notice(request))
    from fxamp.tools.inputs.collect import collect

    graphs = collect(defined, file, _notice(request))
    if not graphs:
        raise ListingError(f"{file}: Dynamo makes no graph of model(inputs): nothing of it would be compiled")
    return graphs


def _prepare_exported(file: str, request: Request) -> "list[ProgramGraph]":
    if not request.trust:
        raise ListingError(f"{file}: torch runs code that a .pt2 holds when it reads it; accepted with --trust")
    from fxamp.tools.inputs.exported import prepare_exported

    return [prepare_exported(file)]


def _notice(request: Request) -> Callable[[str], None]:
    return lambda text: notice(f"{request.prog}: {text}")


_PREPARE: "Mapping[str, Callable[[str, Request], list[ProgramGraph]]]" = {
    "graph": lambda file, _: _prepare_read(_readable(file), file),
    "runnable": _prepare_runnable,
    "model": _prepare_model,
    "exported": _prepare_exported,
}
