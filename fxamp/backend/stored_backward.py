"""A backward graph in AOTAutograd's cache: stored before fxamp rewrites it, rewritten and compiled when it first runs.

AOTAutograd stores the result of compiling a backward if that is an ``OutputCode`` of Inductor. Storing compiled code is
impossible, because only a run shows which gradients of unused results to leave out, and the scaler belongs to a
process. So the graph is stored, and Inductor's own cache has the code of the rewritten graph. Imports Inductor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from fxamp.pipeline.participant import Boxed
from fxamp.torch_private import dump_graph, load_graph, of_this_process, uncacheable
from fxamp.torch_private.parts.fx import detect_fake_mode
from fxamp.torch_private.parts.inductor import OutputCode

#: Settings of Inductor that belong to a process; a loaded graph gets those of its own.
_OF_PROCESS = ("cudagraphs", "boxed_forward_device_index", "graph_id", "compile_region_name")


class StoredBackward(OutputCode):
    """A backward graph ``gm`` for example ``inputs``, which runs as ``run``.

    ``settings``: Inductor's keyword arguments for the graph. Another process makes it runnable with the ``load`` that
    :func:`~fxamp.torch_private.storing_backwards` yields.
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any], run: Boxed) -> None:
        super().__init__()
        self._boxed_call = True
        self._stored = b""
        self._settings = {key: value for key, value in settings.items() if key not in _OF_PROCESS}
        self._unstored: tuple[GraphModule, Sequence[Any]] | None = (gm, inputs)
        self._run: Boxed | None = run

    def __call__(self, inputs: Any) -> Any:
        """Run the graph; ``inputs`` is a list, which is emptied."""
        assert self._run is not None, "the graph has not been loaded"
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Replace the graph by bytes. If that is impossible, raises the error by which torch's cache skips a graph."""
        assert self._unstored is not None
        try:
            self._stored = dump_graph(*self._unstored)
        except Exception as error:
            raise uncacheable(f"the backward graph cannot be stored: {error}") from error
        self._unstored = self._run = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Make a graph that the cache returned runnable; ``graph_kwargs``: Inductor's settings of this process."""
        mode = detect_fake_mode(example_inputs)
        assert mode is not None, "the inputs are not fake"
        gm, inputs = load_graph(self._stored, mode)
        own = {key: graph_kwargs[key] for key in _OF_PROCESS if key in graph_kwargs}
        self._run = of_this_process("load")(gm, inputs, {**self._settings, **own})

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Do nothing: kernels are in Inductor's own cache."""
