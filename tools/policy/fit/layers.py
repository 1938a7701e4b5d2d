"""Parts of a model that a rule can name: layers that are alike, the first and the last apart, and all else."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median_low
from typing import Any

from torch import nn

from fxamp.policy.model.module_globs import covers_module
from fxamp.tools.bench.cost.count import Moment
from fxamp.tools.policy.calibrate.rules import exact

#: The kind of the part that has no layers.
REST = "rest"

#: With more kinds of layers than this, first and last are not apart.
_APART = 2


@dataclass(frozen=True)
class Scope:
    """A part of a model.

    ``modules``: globs that cover it, none for the whole model. ``word``: its name in ids.

    ``size``: how many layers stand for each one that :func:`shortened` leaves of it. ``kind``: the same for parts whose
    layers are alike. ``of``: how many parts the model has.
    """

    name: str
    modules: tuple[str, ...] = ()
    word: str = ""
    size: float = 1.0
    kind: str = ""
    of: int = 1


def scopes(model: Any) -> list[Scope]:
    """Return the parts of ``model``, in order; one, the whole, for a model without layers that are alike."""
    if not isinstance(model, nn.Module):
        return [Scope("model")]
    kinds = list(_kinds(model))
    if not kinds:
        return [Scope("model")]
    known = [path for path, _ in model.named_modules()]
    parts: list[Scope] = []
    for container, paths in kinds:
        for word, some, size in _cuts(paths, len(kinds)):
            globs = tuple(exact(path, known) for path in some)
            name = _name(word, container, kinds, paths)
            slug = word if len(kinds) == 1 else re.sub(r"[^A-Za-z0-9]+", "-", name)
            parts.append(Scope(name, globs, slug, size, paths[0]))
    rest = tuple(exact(path, known) for path in _rest(model, [path for _, paths in kinds for path in paths]))
    parts += [Scope("rest", rest, "rest", kind=REST)] if rest else []
    return [replace(part, of=len(parts)) for part in parts]


def _cuts(paths: list[str], kinds: int) -> list[tuple[str, list[str], float]]:
    """Cut layers that are alike into parts, each with how many layers stand for one of the short model."""
    if len(paths) == 2 or kinds > _APART:
        return [("all", paths, len(paths) / 2)]
    return [("first", paths[:1], 1), ("middle", paths[1:-1], len(paths) - 2), ("last", paths[-1:], 1)]


def by_scope(parts: Sequence[Scope], moments: Sequence[Moment]) -> dict[str, float]:
    """Return the most bytes in use while each part of a model runs, forward and backward.

    What is in no layer stands after the layer before it: a loss after the last one, embeddings of a backward after the
    first. So does a layer's kernel that runs while others do. After a layer at least as much is in use as by its last
    kernel, whatever runs then: so all policies have the same names.
    """
    most: dict[str, float] = {}
    ends: dict[str, float] = {}
    latest, before = "start", 0.0
    for stage, some in groupby(moments, key=lambda moment: moment.stage):
        own, first = list(some), f"{stage}, after {latest}"
        for moment, part in zip(own, _running(parts, own), strict=True):
            latest = part or latest
            name = f"{stage}, {'' if part else 'after '}{latest}"
            most[name] = max(most.get(name, 0.0), moment.bytes)
            if part:
                ends[f"{stage}, after {part}"] = moment.bytes
        most.setdefault(first, before)
        before = own[-1].bytes
    return most | {name: max(bytes_, most.get(name, 0.0)) for name, bytes_ in ends.items()}


def _running(parts: Sequence[Scope], moments: Sequence[Moment]) -> list[str]:
    """Return the part whose layer runs at each moment of one stage, "" where none does.

    Compilers run some kernels of a layer earlier or later, such as casts of its weights. The order of layers is that of
    their middle kernels; those that run are the longest sequence of moments in that order.
    """
    layers = {glob: part.name for part in parts if part.kind != REST for glob in part.modules}
    at: dict[str, list[int]] = defaultdict(list)
    for place, moment in enumerate(moments):
        for glob in layers:
            if covers_module(glob, moment.module):
                at[glob].append(place)
    order = sorted(at, key=lambda glob: median_low(at[glob]))
    rank = {place: number for number, glob in enumerate(order) for place in at[glob]}
    ends: list[int] = []  # of sequences of each length, the place whose rank is least
    previous: dict[int, int] = {}
    for place in sorted(rank):
        length = bisect_right(ends, rank[place], key=rank.__getitem__)
        previous[place] = ends[length - 1] if length else -1
        ends[length : length + 1] = [place]
    running, place = [""] * len(moments), ends[-1] if ends else -1
    while place >= 0:
        running[place] = layers[order[rank[place]]]
        place = previous[place]
    return running


def as_of(part: Scope, parts: Sequence[Scope], added: Mapping[str, float]) -> dict[str, float]:
    """Return what ``part`` adds to the bytes of each moment, where the middle one of its kind adds ``added``.

    What the first layer keeps is in use before the middle one runs, and still when that has run backward.
    """
    alike = [other.name for other in parts if other.kind == part.kind]
    if len(alike) < len(("first", "middle", "last")):
        return dict(added)
    moved = {
        f"{stage}, {name}": added.get(f"{stage}, {alike[min(max(at + 1 - alike.index(part.name), 0), 2)]}", 0.0)
        for stage in ("forward", "backward")
        for at, name in enumerate(alike)
    }
    return {**added, **moved}


@contextmanager
def shortened(model: Any) -> Iterator[None]:
    """Within the block, ``model`` has few layers: of those that are alike the first, one other, and the last.

    Where first and last are not apart, there are two.
    """
    before = [(part, dict(part._modules)) for part in model.modules()] if isinstance(model, nn.Module) else []
    try:
        shorten(model)
        yield
    finally:
        for part, inside in before:
            part._modules.clear()
            part._modules.update(inside)


def shorten(model: Any) -> Any:
    """Take layers out of ``model`` as :func:`shortened` does, and return it."""
    kinds = list(_kinds(model)) if isinstance(model, nn.Module) else []
    for container, paths in kinds:
        layers = model.get_submodule(container)
        for path in paths[2:-1] if len(kinds) <= _APART else paths[2:]:
            del layers._modules[path.rpartition(".")[2]]
    for container in dict.fromkeys(container for container, _ in kinds):
        layers = model.get_submodule(container)
        inside = list(layers._modules.values())
        layers._modules.clear()
        layers._modules.update({str(at): layer for at, layer in enumerate(inside)})
    return model


def _name(word: str, container: str, kinds: list[tuple[str, list[str]]], paths: list[str]) -> str:
    several = sum(other == container for other, _ in kinds) > 1
    return f"{word} of {container}" + (f" like {paths[0].rpartition('.')[2]}" if several else "")


def _kinds(model: nn.Module, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each outermost list of layers with the paths of those that are alike, two or more, in order."""
    for name, child in model.named_children():
        inner = f"{path}.{name}" if path else name
        alike: dict[object, list[str]] = defaultdict(list)
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            for at, layer in child.named_children():
                if any(True for _ in layer.parameters()):
                    alike[_signature(layer)].append(f"{inner}.{at}")
        groups = [paths for paths in alike.values() if len(paths) > 1]
        if groups:
            yield from ((inner, paths) for paths in groups)
        else:
            yield from _kinds(child, inner)


def _signature(layer: nn.Module) -> object:
    classes = tuple(type(module) for module in layer.modules())
    return classes, tuple((name, tuple(value.shape)) for name, value in layer.named_parameters())


def _rest(model: nn.Module, layers: list[str], path: str = "") -> Iterator[str]:
    """Yield the outermost modules that hold none of ``layers``, and are none."""
    for name, child in model.named_children():
        inner = f"{path}.{name}" if path else name
        if inner in layers:
            continue
        if any(layer.startswith(f"{inner}.") for layer in layers):
            yield from _rest(child, layers, inner)
        else:
            yield inner
