"""Run a model's batches in float32, and collect for every call the ranges of its values and of their gradients."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from fxamp.errors import ListingError
from fxamp.graph import all_graphs
from fxamp.policy import Policy, Recipe
from fxamp.tools.common.progress import bar
from fxamp.tools.common.restoration import restored
from fxamp.tools.common.silence import quiet
from fxamp.tools.inputs.measurement import Batch, calling, failure, unlimited_recompiles
from fxamp.tools.policy.batches import Workload
from fxamp.tools.policy.calibrate.ranges import Format, Range
from fxamp.tools.policy.calibrate.watch import Show, Watch
from fxamp.tools.policy.operands import Operand
from fxamp.tools.policy.places import ModuleOp, Use, Watched, watched


@dataclass(frozen=True)
class Sample:
    """One value of one call: its role in the call, its range, and the range of its gradient."""

    place: ModuleOp
    what: str
    raised: bool
    forward: Range
    gradient: Range


@dataclass(frozen=True)
class Scaled:
    """An operand of a product in fp8, and the range of its values times their scales."""

    place: ModuleOp
    recipe: Recipe
    operand: Operand
    range: Range


@dataclass(frozen=True)
class Evidence:
    """All samples, in graph order; the number of batches that ran, and of the graphs they made.

    ``scaled`` are the operands of products in fp8. ``unseen`` are the values of calls that did not run, or cannot be
    watched: those in a branch of a cond that no batch took, and those inside a custom autograd.Function.
    ``stopped``: Ctrl-C ended the batches.
    """

    samples: tuple[Sample, ...]
    batches: int
    graphs: int
    scaled: tuple[Scaled, ...] = ()
    unseen: tuple[Sample, ...] = ()
    stopped: bool = False


def gather(work: Workload, policy: Policy, gradients: bool) -> Evidence:
    """Run every batch of ``work``; with ``gradients`` also the backward from its loss. The model does not change.

    Raises ListingError if there is nothing to learn: no batch, no op that the policy would run in 16 bits, a loss that
    is not finite, or gradients that are all zero or not finite.
    """
    watcher = _Watcher(policy, gradients)
    torch._dynamo.reset()
    with quiet(), unlimited_recompiles(), restored(work.model, work.loss.function):
        compiled = torch.compile(calling(work.model), backend=watcher.compile)
        count, stopped = _run_all(work, compiled, watcher)
    torch._dynamo.reset()
    every = [sample for graph in watcher.graphs for sample in graph.samples()]
    samples = tuple(sample for sample in every if sample.forward.count)
    _require_something(work.file, policy, samples, count, gradients)
    unseen = tuple(sample for sample in every if not sample.forward.count)
    scaled = [operand for graph in watcher.graphs for operand in graph.scaled if operand.range.count]
    return Evidence(samples, count, len(watcher.graphs), tuple(scaled), unseen, stopped)


def _run_all(work: Workload, compiled: Callable[..., Any], watcher: "_Watcher") -> tuple[int, bool]:
    """Return how many batches ran, and whether Ctrl-C ended them; before the first is done it ends the command."""
    done = 0
    with bar("batches", work.most, "batch") as shown:
        try:
            for batch in work.batches():
                torch.manual_seed(done)
                _run(work, compiled, batch, watcher, done + 1)
                done += 1
                shown.update()
                shown.set_postfix_str(f"{len(watcher.graphs)} graphs", refresh=False)
        except KeyboardInterrupt:
            if not done:
                raise
            return done, True
    return done, False


def _run(work: Workload, compiled: Callable[..., Any], batch: Batch, watcher: "_Watcher", number: int) -> None:
    where = f"batch {number - 1}"
    try:
        with restored((batch.args, dict(batch.kwargs))):
            with torch.enable_grad() if watcher.gradients else torch.no_grad():
                output = compiled(*batch.args, **batch.kwargs)
                loss = work.loss(output) if watcher.gradients else None
            if loss is not None:
                _backward(work, loss, where)
    except Exception as error:
        raise failure(work.file, f"calling model on {where}", error) from error
    finally:
        watcher.unhook()
        for parameter in work.model.parameters() if isinstance(work.model, torch.nn.Module) else ():
            parameter.grad = None


def _backward(work: Workload, loss: Tensor, where: str) -> None:
    if not bool(loss.isfinite()):
        raise ListingError(f"{work.file}: {where}: the loss is {loss.item()} in float32; accepted: a finite one")
    if not loss.requires_grad:
        raise ListingError(
            f"{work.file}: {where}: the loss depends on nothing that requires a gradient; accepted: a model with "
            "trainable parameters, or --inference, which looks at no gradients"
        )
    loss.backward()  # type: ignore[no-untyped-call]


def _require_something(file: str, policy: Policy, samples: Sequence[Sample], batches: int, gradients: bool) -> None:
    if not batches:
        raise ListingError(f"{file}: batches holds no batch: there is nothing to calibrate on; accepted: one or more")
    low = [sample for sample in samples if not sample.raised]
    if not low:
        raise ListingError(
            f"{file}: policy {policy.name!r} runs nothing of model in {policy.lower_precision_fp}: there is nothing to "
            "calibrate; accepted: a model with floating-point ops that torch.compile captures"
        )
    if not gradients:
        return
    spoiled = next((sample for sample in samples if sample.gradient.nonfinite), None)
    if spoiled is not None:
        where = f"{spoiled.place.op} in {spoiled.place.module or 'the root module'}"
        raise ListingError(f"{file}: the gradient at the {spoiled.what} of {where} is not finite even in float32")
    if not any(sample.gradient.nonzero for sample in low):
        raise ListingError(
            f"{file}: all gradients are zero: there is nothing to calibrate them on; accepted: a loss that depends on "
            "the parameters, or --inference, which looks at no gradients"
        )


@dataclass
class _Graph:
    """A watched graph, and the ranges of the relevant values, by the name of their node."""

    watched: Watched
    format: Format
    gradients: bool
    ranges: list[dict[str, tuple[Range, Range]]] = field(default_factory=list)
    scaled: list[Scaled] = field(default_factory=list)
    _shows: list[Show] = field(default_factory=list)

    def __post_init__(self) -> None:
        for uses in self.watched.uses:
            names = dict.fromkeys(name for use in uses for name in use.values)
            self.ranges.append({name: (Range(self.format), Range(self.format)) for name in names})
            scaled = [s for use in uses for s in _scaled(use) if self.gradients or not s.operand.backward]
            self.scaled += scaled
            self._shows.append(_into(self.ranges[-1], scaled))

    def shows(self) -> dict[GraphModule, Show]:
        """Return the callback that gets the values of each graph."""
        return dict(zip(all_graphs(self.watched.module), self._shows, strict=True))

    def samples(self) -> list[Sample]:
        """Return the values of all calls, including those that did not run."""
        return [
            Sample(use.place, what, use.raised, *ranges[name])
            for uses, ranges in zip(self.watched.uses, self.ranges, strict=True)
            for use in uses
            for name, what in use.values.items()
        ]


def _scaled(use: Use) -> Iterator[Scaled]:
    for operand in use.operands:
        assert use.recipe is not None
        yield Scaled(use.place, use.recipe, operand, Range(Format.of_name(operand.form.dtype)))


def _into(ranges: dict[str, tuple[Range, Range]], scaled: Sequence[Scaled]) -> Show:
    of_value: dict[tuple[str, bool], list[Scaled]] = defaultdict(list)
    for entry in scaled:
        of_value[entry.operand.value, entry.operand.gradient].append(entry)

    def show(name: str, value: Tensor, gradient: bool) -> None:
        if name in ranges:
            ranges[name][gradient].add(value)
        for entry in of_value.get((name, gradient), ()):
            entry.range.add(entry.operand.scaled(value))

    return show


class _Watcher:
    """The torch.compile backend that watches values."""

    def __init__(self, policy: Policy, gradients: bool) -> None:
        self.gradients = gradients
        self.graphs: list[_Graph] = []
        self._policy = policy
        self._format = Format.of_name(policy.lower_precision_fp)
        self._handles: list[RemovableHandle] = []

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph of Dynamo's; the returned callable runs it."""
        graph = _Graph(watched(gm, inputs, self._policy), self._format, self.gradients)
        self.graphs.append(graph)
        shows = graph.shows()
        return lambda *args: Watch(graph.watched.module, shows, self.gradients, self._handles).run(*args)

    def unhook(self) -> None:
        """Remove the hooks of the last batch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
