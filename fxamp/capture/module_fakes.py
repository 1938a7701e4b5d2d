"""Replace the tensors that a module holds by FakeTensors while it is traced, so that tracing writes to no user tensor.

Otherwise an in-place op on a parameter, a buffer or a constant of the graph would run for real during tracing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Proxy

from fxamp.capture.distinct_results import OwnResults
from fxamp.graph import hold, tensor_stores
from fxamp.graph.submodules import submodules
from fxamp.torch_private.parts.fx import disable_proxy_modes_tracing, track_tensor_tree


class ModuleFakes:
    """FakeTensors for the tensors of a traced module; each is a ``get_attr`` node of the new graph.

    The new graph's module holds the same real tensors under the same names, so it shares the module's state.
    """

    def __init__(self, fake_mode: FakeTensorMode, tracing: OwnResults) -> None:
        self._fake_mode = fake_mode
        self._tracing = tracing
        self._fakes: dict[int, Tensor] = {}

    def fake(self, path: str, tensor: Tensor) -> Tensor:
        """Return the FakeTensor for ``tensor``, which the traced module holds under the dotted ``path``."""
        if id(tensor) not in self._fakes:
            tracer: Any = self._tracing.tracer
            with disable_proxy_modes_tracing():
                fake = self._fake_mode.from_tensor(tensor, static_shapes=True)
            node = tracer.graph.get_attr(hold(tracer.root, path, tensor))
            track_tensor_tree(fake, Proxy(node, tracer), constant=None, tracer=tracer)
            self._fakes[id(tensor)] = fake
        return self._fakes[id(tensor)]

    @contextmanager
    def replacing(self, path: str, module: nn.Module) -> Iterator[None]:
        """Replace the tensors of ``module``, held under ``path``, by FakeTensors; restore its state on exit."""
        with _tensors_replaced(module, lambda name, tensor: self.fake(f"{path}.{name}", tensor)):
            yield


@contextmanager
def _tensors_replaced(module: nn.Module, replacement: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    stores = [(path, store) for path, sub in submodules(module) for store in tensor_stores(sub)]
    before = [(store, {name: v for name, v in store.items() if isinstance(v, Tensor)}) for _, store in stores]
    for path, store in stores:
        for name, value in list(store.items()):
            if isinstance(value, Tensor):
                store[name] = replacement(f"{path}.{name}" if path else name, value)
    try:
        yield
    finally:
        for store, tensors in before:
            store.update(tensors)
