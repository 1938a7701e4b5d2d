"""The inputs of an optimizer's next step: tensors, numbers, and everything else that a trace depends on."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, pairwise
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.errors import NotCompilableError
from fxamp.optim.reading.fingerprint import fingerprint, own_attributes, setting_fingerprint, tensor_properties
from fxamp.optim.reading.reachable import require_no_identities
from fxamp.optim.shards import WHOLE, is_dtensor, is_stored, joined, laid_out_alike, local, settle_gradient, spread_of

OTHER = -1
"""In the place of a parameter's position: state that belongs to no parameter."""


@dataclass(frozen=True, eq=False)
class Layout:
    """One optimizer at one moment; its tensors and numbers have a fixed order, in which the compiled step takes them.

    For each DTensor it holds this rank's part.

    Attributes:
        parameters: all of them, group by group.
        gradients: one for each parameter, None if it has none.
        settings: each group's, without "params".
        state: the entry of each owner: a parameter, or one of the optimizer's own keys.
        attributes: the optimizer's own.
        sizes: the number of parameters in each group.
        owners: the optimizer's own parameters, in the same order; they differ from ``parameters`` where they are
            DTensors.
        wholes: the DTensor of each part, by the part's id.
        counted: the names of settings to which each step may add one; here they are floats.
    """

    parameters: list[Tensor]
    gradients: list[Tensor | None]
    settings: list[dict[str, Any]]
    state: dict[Any, dict[str, Any]]
    attributes: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    owners: list[Tensor] = field(default_factory=list)
    wholes: dict[int, Tensor] = field(default_factory=dict)
    counted: frozenset[str] = frozenset()

    def group_of(self) -> list[int]:
        """Return the group index of each parameter."""
        return [at for at, size in enumerate(self.sizes) for _ in range(size)]

    def only(self, positions: Collection[int]) -> "Layout":
        """Return the layout of an optimizer with only these parameters; all groups' settings are kept."""
        chosen = [at in positions for at in range(len(self.parameters))]
        groups = [group for group, taken in zip(self.group_of(), chosen, strict=True) if taken]
        parameters = list(compress(self.parameters, chosen))
        known = {id(parameter) for parameter in parameters}
        return Layout(
            parameters,
            list(compress(self.gradients, chosen)),
            self.settings,
            {owner: v for owner, v in self.state.items() if not isinstance(owner, Tensor) or id(owner) in known},
            self.attributes,
            tuple(groups.count(at) for at in range(len(self.sizes))),
            list(compress(self.owners, chosen)),
            self.wholes,
            self.counted,
        )

    def owner_of(self, owner: Any) -> Any:
        """Return the key in the optimizer's own state of an owner in :attr:`state`."""
        return self.wholes.get(id(owner), owner)

    def kept_by(self, owner: Any, value: Any) -> Any:
        """Return a new state value in the form that the optimizer keeps: for a part of a DTensor, a DTensor."""
        whole = self.wholes.get(id(owner))
        return value if whole is None else joined(value, whole)

    def is_split(self, at: int) -> bool:
        """Whether this rank has only a part of a parameter."""
        whole = self.wholes.get(id(self.parameters[at]))
        return whole is not None and spread_of(whole) != WHOLE

    def whole_tensors(self) -> list[Tensor]:
        """Return :meth:`tensors` with stand-ins of the whole's size for parts of DTensors: the same on all ranks."""

        def whole(tensor: Tensor, like: Tensor) -> Tensor:
            dtensor = self.wholes.get(id(like))
            if dtensor is None:
                return tensor
            return torch.empty_strided(dtensor.shape, dtensor.stride(), dtype=tensor.dtype, device="meta")

        pairs = zip(self.gradients, self.parameters, strict=True)
        gradients = [whole(gradient, parameter) for gradient, parameter in pairs if gradient is not None]
        own, state = self.parameters, self.state_tensors()
        return [*(whole(t, t) for t in own), *gradients, *self.setting_tensors(), *(whole(t, t) for t in state)]

    def _positions(self) -> dict[int, int]:
        return {id(parameter): at for at, parameter in enumerate(self.parameters)}

    def written(self) -> list[Tensor]:
        """Return the parameters that have a gradient, and the tensors of their states and of the optimizer's own."""
        parameters = [
            own for own, gradient in zip(self.parameters, self.gradients, strict=True) if gradient is not None
        ]
        idle = {id(own) for own in self.parameters} - set(map(id, parameters))
        entries = [entry for owner, entry in self.state.items() if id(owner) not in idle]
        return [*parameters, *(value for entry in entries for value in entry.values() if isinstance(value, Tensor))]

    def active(self) -> list[Tensor]:
        """Return the gradients that are not None."""
        return [gradient for gradient in self.gradients if gradient is not None]

    def state_tensors(self) -> list[Tensor]:
        """Return every tensor of the state, owner by owner."""
        return [value for entry in self.state.values() for value in entry.values() if isinstance(value, Tensor)]

    def setting_tensors(self) -> list[Tensor]:
        """Return every tensor among the settings, a learning rate for example, and among the attributes."""
        return [*(v for v in self._leaves if isinstance(v, Tensor)), *self.held_tensors().values()]

    @cached_property
    def _leaves(self) -> list[Any]:
        return [leaf for group in self.settings for value in group.values() for leaf in _leaves(value)]

    def held_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are attributes of the optimizer, by name; they are 0-dim."""
        return {name: value for name, value in self.attributes.items() if isinstance(value, Tensor)}

    def setting_places(self) -> slice:
        """Return where :meth:`setting_tensors` stand in :meth:`tensors`."""
        start = len(self.parameters) + len(self.active())
        return slice(start, start + len(self.setting_tensors()))

    def floats(self) -> list[float]:
        """Return every float among the settings, in order."""
        return [value for value in self._leaves if type(value) is float]

    def counted_places(self) -> set[int]:
        """Return where the counted settings stand in :meth:`floats`."""
        names = [name for group in self.settings for name, value in group.items() for leaf in _leaves(value)]
        floats = [name for name, leaf in zip(names, self._leaves, strict=True) if type(leaf) is float]
        return {at for at, name in enumerate(floats) if name in self.counted}

    def tensors(self) -> list[Tensor]:
        """Return all tensor inputs of the step, in the compiled step's order."""
        return [*self.parameters, *self.active(), *self.setting_tensors(), *self.state_tensors()]

    def roles(self) -> list[tuple[int | None, Hashable]]:
        """Return, for each of :meth:`tensors`, the position of its parameter, and its name.

        The position is None for the settings, which belong to all, and :data:`OTHER` for state under other keys.
        """
        positions = self._positions()
        return [
            *((at, "parameter") for at in range(len(self.parameters))),
            *((at, "gradient") for at, gradient in enumerate(self.gradients) if gradient is not None),
            *((None, f"setting{at}") for at in range(len(self.setting_tensors()))),
            *(
                (positions.get(id(owner), OTHER), name)
                for owner, entry in self.state.items()
                for name, value in entry.items()
                if isinstance(value, Tensor)
            ),
        ]

    def places(self) -> list[list[int]]:
        """Return, for each parameter, the indices in :meth:`tensors` of the tensors of ``only((position,))``."""
        own: dict[int | None, list[int]] = {at: [] for at in (None, OTHER, *range(len(self.parameters)))}
        for place, (at, _) in enumerate(self.roles()):
            own[at].append(place)
        return [sorted([*own[None], *own[at]]) for at in range(len(self.parameters))]

    def key(self) -> Hashable:
        """Return everything that a trace of the step depends on, except the values of floats."""
        at = self._positions()
        state = tuple(
            (at.get(id(o), o) if isinstance(o, Tensor) else o, fingerprint(entry)) for o, entry in self.state.items()
        )
        return (
            tuple(tensor_properties(parameter) for parameter in self.parameters),
            tuple(owner.requires_grad for owner in self.owners),
            tuple(None if gradient is None else tensor_properties(gradient) for gradient in self.gradients),
            tuple(
                tuple((name, setting_fingerprint(value)) for name, value in group.items()) for group in self.settings
            ),
            self.sizes,
            state,
            fingerprint(self.attributes),
            tuple(tensor_properties(tensor) for tensor in self.whole_tensors()) if self.wholes else (),
        )


def read_layout(optimizer: torch.optim.Optimizer, counted: frozenset[str] = frozenset()) -> Layout:
    """Read the layout of the optimizer's next step, which adds one to the settings ``counted``.

    Raises:
        NotCompilableError: something that a compiled step does not support: sparse gradients, tensor subclasses,
            several devices, state that is not a dict of tensors and constants, a parameter that is there twice, memory
            that two tensors share which a step may write to.
    """
    owners = optimized_parameters(optimizer)
    settings = settings_of(optimizer, counted)
    known = {id(parameter): local(parameter) for parameter in owners}
    if len(known) < len(owners):
        raise NotCompilableError("a parameter is in its groups twice, and each step steps it twice")
    gradients = gradients_of(owners)
    state_of_optimizer = {
        o: v for o, v in optimizer.state.items() if v and (not isinstance(o, Tensor) or id(o) in known)
    }
    _require_plain([*known.values()], gradients, state_of_optimizer)
    wholes, state = {id(part): owner for owner in owners if (part := known[id(owner)]) is not owner}, {}
    for owner, entry in state_of_optimizer.items():
        state[known.get(id(owner), owner) if isinstance(owner, Tensor) else owner] = _parts(owner, entry, wholes)
    sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
    own = own_attributes(optimizer)
    _require_held(own, owners)
    for held in (own, *settings):
        require_no_identities(held, owners)
    layout = Layout([*map(local, owners)], gradients, settings, state, own, sizes, owners, wholes, counted)
    if _share_memory(layout.written()):
        raise NotCompilableError("some of its parameters, or tensors of their states, share memory")
    return layout


def gradients_of(owners: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of an optimizer's parameters in the parameters' layout; for DTensors this rank's part.

    Raises:
        NotCompilableError: a gradient cannot be laid out so.
    """
    gradients: list[Tensor | None] = []
    for owner in owners:
        gradient = settle_gradient(owner)
        if gradient is not None and not laid_out_alike(gradient, owner):
            raise NotCompilableError("a gradient is a DTensor and its parameter is not, or the other way round")
        gradients.append(local(gradient))
    return gradients


def _parts(owner: Any, entry: dict[str, Any], wholes: dict[int, Tensor]) -> dict[str, Any]:
    """Return an entry with DTensors replaced by this rank's parts, recorded in ``wholes``; itself if it has none."""
    dtensors = {name: value for name, value in entry.items() if isinstance(value, Tensor) and is_dtensor(value)}
    for name, value in dtensors.items():
        if not isinstance(owner, Tensor) or not laid_out_alike(value, owner):
            raise NotCompilableError(f"{name!r} of its state is a DTensor with a different layout than its parameter")
        wholes[id(local(value))] = value
    return {name: local(value) for name, value in entry.items()} if dtensors else entry


def optimized_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, as they are now."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def settings_of(optimizer: torch.optim.Optimizer, counted: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Return each group's settings: everything but the parameters and their names; the ``counted`` ones as floats."""
    return [
        {
            name: setting_as_read(name, value, counted)
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def setting_as_read(name: object, value: Any, counted: frozenset[str]) -> Any:
    """Return a group's setting as a compiled step reads it: the ``counted`` numbers are floats."""
    return float(value) if name in counted and is_number(value) else value


def is_number(value: Any) -> bool:
    """Whether a setting is a plain number, which a step can count in."""
    return type(value) in (int, float)


def with_values(
    settings: Sequence[Mapping[str, Any]], floats: Iterator[Any], tensors: Iterator[Any]
) -> list[dict[str, Any]]:
    """Return the settings with their floats and tensors replaced, in the order of :class:`Layout`."""

    def replaced(value: Any) -> Any:
        if type(value) is float:
            return next(floats)
        if isinstance(value, Tensor):
            return next(tensors)
        if type(value) in (tuple, list):
            return type(value)(replaced(item) for item in value)
        return value

    return [{name: replaced(value) for name, value in group.items()} for group in settings]


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether the memory of two of the tensors overlaps, from the first to the last element of each."""
    spans = sorted(_memory(tensor) for tensor in tensors if is_stored(tensor) and tensor.numel())
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return where the memory of a tensor that is not empty starts and ends."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _leaves(value: Any) -> Sequence[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if type(value) in (tuple, list) else (value,)


def _require_held(attributes: Mapping[str, Any], owners: Sequence[Tensor]) -> None:
    """Raise NotCompilableError for a tensor among the attributes that cannot be an input of the step."""
    devices = {owner.device for owner in owners}
    for name, value in attributes.items():
        if isinstance(value, Tensor) and (value.dim() or {value.device} != devices or type(value) is not Tensor):
            raise NotCompilableError(
                f"its attribute {name!r} is a {type(value).__name__} of shape {list(value.shape)} on {value.device};"
                " accepted as attributes: 0-dim tensors on the parameters' device. Keep others in state[parameter]"
            )


def _require_plain(parameters: list[Tensor], gradients: list[Tensor | None], state: Mapping[Any, Any]) -> None:
    for tensor in (*parameters, *(gradient for gradient in gradients if gradient is not None)):
        if tensor.layout is not torch.strided:
            raise NotCompilableError("a gradient is sparse")
        if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise NotCompilableError(f"a parameter or gradient is a {type(tensor).__name__}, not a plain tensor")
        if tensor.is_complex():
            raise NotCompilableError("a parameter is complex")
    if len({parameter.device for parameter in parameters}) > 1:
        raise NotCompilableError("its parameters are on several devices")
    for entry in state.values():
        if not isinstance(entry, dict) or any(isinstance(v, (list, tuple, dict, set)) for v in entry.values()):
            raise NotCompilableError("its state is not a dict of tensors and plain values for each parameter")
