"""The records of all graphs that this process compiled, in order of compilation, with the models they ran for."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import Any

import torch

from fxamp.graph.submodules import first_names, named_parameters
from fxamp.reports import GraphRecord
from fxamp.reports.break_reasons import Place, place_of
from fxamp.reports.runs import Runs, original
from fxamp.torch_private import backends_of_compiles, compiled_code

#: Records in order of compilation; None once every model of the graph is gone, until the graph runs for a new model.
_graphs: list[Runs | None] = []
_remembering = RLock()

#: Callers and answers of :func:`follows_autocast` by the caller's id, until a graph runs for something new.
_following: dict[int, tuple[weakref.ref[Any], bool]] = {}


def remember(record: GraphRecord, under_autocast: bool) -> Runs:
    """Keep ``record`` as long as a model exists for which its graph ran; ``under_autocast`` as in :class:`Runs`."""
    with _remembering:
        _graphs[:] = [None if graph is None or graph.forgotten else graph for graph in _graphs]
        code = compiled_code()
        function = None if code is None else place_of(code)
        graph = Runs(record, under_autocast, function, _keep_as(len(_graphs)))
        _graphs.append(graph)
    return graph


def _known() -> list[Runs]:
    return [graph for graph in _graphs if graph is not None]


def _keep_as(number: int) -> Callable[[Runs], None]:
    graphs, following = _graphs, _following  # at exit, Python deletes the module's names before the last models

    def keep(graph: Runs) -> None:
        if not graph.forgotten:
            graphs[number] = graph
        following.clear()

    return keep


def follows_autocast(caller: object, parameters: Sequence[torch.Tensor] = ()) -> bool:
    """Whether ``caller``, a module or function, has run under torch.autocast, or around a region of it.

    This also holds if a graph under autocast reads one of ``parameters``, or a parameter that a graph of ``caller``
    reads.
    """
    if caller is None:
        return False
    with _remembering:
        asked, follows = _following.get(id(caller), (None, False))
        if asked is None or asked() is not caller:
            follows = _follows(caller)
            _following[id(caller)] = weakref.ref(caller), follows
        return follows or any(graph.reads_any(parameters) for graph in _under_autocast())


def _follows(caller: object) -> bool:
    own = [graph for graph in _known() if graph.ran_for(caller)]
    return any(graph.ran_for(caller) or any(map(graph.reads_any_of, own)) for graph in _under_autocast())


def _under_autocast() -> list[Runs]:
    return [graph for graph in _known() if graph.under_autocast]


def forget_autocast() -> None:
    """Forget which models ran under torch.autocast, as in a new process."""
    with _remembering:
        for graph in _under_autocast():
            graph.under_autocast = False
        _following.clear()


def is_fxamp(backend: object) -> bool:
    """Whether torch.compile made ``backend`` from fxamp's function, whose ``reset`` is :func:`forget_autocast`."""
    return getattr(getattr(backend, "compiler_fn", None), "reset", None) is forget_autocast


def count() -> int:
    """Return how many graphs were compiled so far."""
    return len(_graphs)


def recent(since: int) -> list[GraphRecord]:
    """Return the records from number ``since`` on, in order of compilation, of models that still exist."""
    return [graph.record for graph in _graphs[since:] if graph is not None]


def records_of(compiled: Any) -> list[GraphRecord]:
    """Return the records of graphs that ran for ``compiled``, a module or function, in order of compilation."""
    return [graph.record for graph in _graphs_of(compiled)]


def graphs_of_function(place: Place) -> list[Runs]:
    """Return the graphs that Dynamo made of the function at ``place``."""
    return [graph for graph in _known() if graph.function == place]


def graphs_that_ended(how: str) -> list[Runs]:
    """Return the graphs whose break's reason ends with ``how``."""
    return [graph for graph in _known() if graph.record.ended.endswith(how)]


def runs_for_any(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a graph read one of ``parameters``."""
    read = list(parameters)
    return any(graph.reads_any(read) for graph in _known())


def all_ran() -> bool:
    """Whether a graph ran for every call of torch.compile with fxamp since Dynamo was last reset; False if unknown."""
    backends = backends_of_compiles()
    known = _known()
    return backends is not None and all(
        any(graph.ran_through(backend) for graph in known) for backend in filter(is_fxamp, backends)
    )


def outside(compiled: Any) -> list[str]:
    """Return the names of the parameters of ``compiled`` that no graph read."""
    module = original(compiled)
    if not isinstance(module, torch.nn.Module):
        return []
    read = {name for graph in _graphs_of(compiled) for name in graph.parameters_read(module)}
    return [name for name in first_names(named_parameters(module)) if name not in read]


def _graphs_of(compiled: Any) -> list[Runs]:
    """Return the graphs that ran for ``compiled``, a module or function, in order of compilation."""
    owners = (compiled, original(compiled))
    return [graph for graph in _known() if any(map(graph.ran_for, owners))]
