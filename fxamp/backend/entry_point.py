"""The entry point that ``torch.compile(model, backend="fxamp")`` calls with each graph that Dynamo captured."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from fxamp.backend.compilation import GraphCompilation
from fxamp.backend.options import parse_options
from fxamp.errors import BannedOpError, CaptureError, MachineError, OptionError, PolicyError
from fxamp.reports.registry import forget_autocast
from fxamp.torch_private import raised_through_dynamo


def fxamp(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` in mixed precision; ``example_inputs`` are its inputs, real or fake, in placeholder order.

    ``options`` and ``mode`` are torch.compile's. The returned callable takes the same inputs and returns the outputs as
    a tuple, in the dtypes that Dynamo captured. Raises OptionError or PolicyError before it traces anything, unless
    "auto" has to count products. Dynamo passes such an error on unchanged.
    """
    try:
        return GraphCompilation(gm, example_inputs, parse_options(options, mode)).compile()
    except (OptionError, PolicyError, BannedOpError, CaptureError, MachineError) as error:
        raise raised_through_dynamo(error, fxamp, inspect.currentframe()) from None


fxamp.reset = forget_autocast  # type: ignore[attr-defined]  # torch._dynamo.reset calls it
