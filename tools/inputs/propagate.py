"""Compute the values of a rebuilt graph by running it on FakeTensors; if that fails, use the types in the text."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from fxamp.errors import ListingError
from fxamp.graph import ENTER_AUTOCAST, EXIT_AUTOCAST, nesting_change
from fxamp.graph.higher_order_ops import autograd_function, bodies
from fxamp.tools.inputs.limits import TooLarge, require_small
from fxamp.torch_private.parts.fx import tracing

#: Key of ``node.meta``: a function that creates a call's value from the text's types; None if there are none.
ANNOTATED = "fxamp_annotated"


def propagate(gm: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, file: str) -> None:
    """Set ``meta["example_value"]`` of every node of ``gm`` and of its bodies, for ``inputs`` of ``mode``.

    Raises ListingError for a node that cannot be run and that has no type in the text, which came from ``file``.
    """
    with tracing(None), mode, torch.set_grad_enabled(torch.is_grad_enabled()):
        _Propagation(gm, file).run(*inputs)
    if mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()


class _Propagation(Interpreter):
    def __init__(self, gm: GraphModule, file: str) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.extra_traceback = False
        self._file = file
        self._transforms = 0

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n) if n.op in ("placeholder", "get_attr", "output") else self._call(n)
        n.meta["example_value"] = value
        return value

    def _call(self, n: Node) -> Any:
        before = self._transforms
        self._transforms += nesting_change(n.target)
        if n.target in (ENTER_AUTOCAST, EXIT_AUTOCAST):
            return None
        if max(before, self._transforms):
            return self._as_written(n, "it is inside a torch.func transform")
        if isinstance(n.target, HigherOrderOperator):
            return self._higher_order(n)
        self._require_small(n)
        try:
            return super().run_node(n)
        except Exception as error:
            return self._as_written(n, " ".join(str(error).split())[:200] or type(error).__name__)

    def _require_small(self, n: Node) -> None:
        """Raise ListingError for arithmetic on Python's numbers that makes a huge value: it would be computed."""
        args, _ = self.fetch_args_kwargs_from_env(n)
        if any(isinstance(operand, torch.Tensor) for operand in args):
            return
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        bare = name.strip("_")
        for operation, operands in ((bare, args), (bare[1:], args), (bare[1:], args[::-1])):  # ipow, rpow
            try:
                require_small(operation, operands)
            except TooLarge as error:
                raise ListingError(f"{self._file}: {n.name} computes {error}") from error

    def _higher_order(self, n: Node) -> Any:
        """Return the results of its bodies, if they are the node's results; else the value in the text."""
        function = autograd_function(n)
        if function is not None:
            outputs, saved = self._body(function.forward.module, function.forward.operands)
            flat = [*(outputs if isinstance(outputs, (tuple, list)) else [outputs]), *saved]
            self._run(function.backward.module, flat)
            return outputs
        results = [self._body(body.module, body.operands) for body in bodies(n)]
        return results[0] if results else self._as_written(n, f"{n.target} is not analysed")

    def _body(self, module: GraphModule, operands: Sequence[Any]) -> Any:
        return self._run(module, [self.env[value] if isinstance(value, Node) else value for value in operands])

    def _run(self, module: GraphModule, values: Sequence[Any]) -> Any:
        return _Propagation(module, self._file).run(*values)

    def _as_written(self, n: Node, why: str) -> Any:
        written: Callable[[], Any] | None = n.meta.get(ANNOTATED)
        if written is not None:
            return written()
        if not n.users or nesting_change(n.target):
            return None
        raise ListingError(f"{self._file}: {n.name} cannot be run on its inputs, and the text gives no type: {why}")
