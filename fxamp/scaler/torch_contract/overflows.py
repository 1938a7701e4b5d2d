"""Parameter names and overflow counts per parameter."""

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fxamp.errors import OptionError
from fxamp.graph.submodules import ParameterSlot, submodules
from fxamp.scaler.graphs.flag_table import FlagTable


class ParameterNames:
    """Names of parameters and optimizers, by identity; keeps neither alive.

    A parameter's name is the first of these that exists: the name given by :meth:`add`; the name in its optimizer
    (``optim.AdamW(model.named_parameters())``); its position, ``"group0.param3"``. The last two are prefixed with
    ``"optimizer1."`` for the second optimizer, and so on.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[Callable[[], Tensor | None], str]] = {}
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._optimizer_count = 0

    def add(self, model: nn.Module, prefix: str) -> None:
        """Name the model's parameters as ``model.named_parameters(prefix)`` does.

        Raises:
            OptionError: a parameter of another model already has one of the names.
        """
        parameters = {name: parameter for parameter, name in self._living()}
        slots = {
            id(parameter): ParameterSlot(weakref.ref(module), own)
            for _, module in submodules(model)
            for own, parameter in module._parameters.items()
        }
        for name, parameter in model.named_parameters(prefix=prefix):
            if parameters.get(name, parameter) is not parameter:
                raise OptionError(
                    f"name_parameters: {name!r} already names a parameter of another model; "
                    f"give each model its own prefix, as in name_parameters(model, prefix='generator')"
                )
            self._names[id(parameter)] = slots.get(id(parameter)) or weakref.ref(parameter), name

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer; its parameter groups are read when a name is asked for."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = self._optimizer_count
            self._optimizer_count += 1

    def all(self) -> dict[int, str]:
        """Return every known name, by the parameter's id."""
        names: dict[int, str] = {}
        for optimizer, number in self._optimizers.items():
            prefix = f"optimizer{number}." if number else ""
            for g, group in enumerate(optimizer.param_groups):
                own = group.get("param_names") or [f"group{g}.param{i}" for i in range(len(group["params"]))]
                for parameter, name in zip(group["params"], own, strict=True):
                    names.setdefault(id(parameter), prefix + name)
        return names | {id(parameter): name for parameter, name in self._living()}

    def _living(self) -> Iterator[tuple[Tensor, str]]:
        for find, name in self._names.values():
            parameter = find()
            if parameter is not None:
                yield parameter, name


class OverflowLedger:
    """Counts, per parameter, the checks in which its gradient held an inf or NaN."""

    def __init__(self) -> None:
        self.names = ParameterNames()
        self._tables: dict[torch.device, FlagTable] = {}

    def record(self, parameters: Sequence[Tensor | None], flags: Tensor) -> None:
        """Add the flags (bool, or 0 or 1 in int32, ``[len(parameters)]``) of parameters; waits for no device.

        None stands for a gradient that belongs to no parameter.
        """
        if flags.device not in self._tables:
            self._tables[flags.device] = FlagTable(flags.device)
        self._tables[flags.device].add(parameters, flags)

    def read(self) -> dict[str, int]:
        """Return name -> count for every living parameter that overflowed; waits for the device."""
        names = self.names.all()
        return {
            names.get(id(parameter), "parameter of an optimizer that no longer exists"): count
            for table in self._tables.values()
            for parameter, count in table.nonzero()
        }
