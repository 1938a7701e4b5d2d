"""torch's insides are as fxamp takes them to be: one test for each function that reaches for them.

A failure here on a new torch says which function of fxamp/torch_private.py needs another way.
"""

import ast
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxamp import torch_private as private

ROOT = Path(__file__).parents[1]

#: What only torch_private may reach for.
SHARP = frozenset(
    {
        "AccumulateGrad",
        "_DisableAutocast",
        "_current_autograd_node",
        "_current_graph_task_id",
        "_disable_saved_tensors_hooks_during_tracing",
        "_forward_cls",
        "_fwd_used_autocast",
        "_get_active_ddp_module",
        "_get_current_graph_task_keep_graph",
        "_get_dispatch_mode_pre_dispatch",
        "_global_optimizer_post_hooks",
        "_global_optimizer_pre_hooks",
        "_input_metadata",
        "_is_compiling_flag",
        "_opt_called",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
        "_torchdynamo_orig_backend",
        "add_python_lambda_leaf_guard_to_root",
        "bw_donated_idxs",
        "compiled_bw",
        "fw_metadata",
        "maybe_subclass_metadata",
    }
)


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def doubled(x: Tensor) -> Tensor:
    result: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
    return result


def test_a_graph_that_is_compiled_later_has_the_contexts_of_its_compilation() -> None:
    again: list[Any] = []

    def compiler(gm: Any, _: Any) -> Any:
        again.append((private.current_metadata(), CompileContext.try_get(), private.compiling_again()))
        return make_boxed_func(gm.forward)

    torch.compile(quadrupled, backend=aot_autograd(fw_compiler=compiler))(torch.ones(2, requires_grad=True))
    metadata, compilation, contexts = again[0]
    assert metadata is not None and compilation is not None and private.current_metadata() is None
    with torch.autocast("cpu"), contexts():
        assert private.current_metadata() is metadata and CompileContext.try_get() is compilation
        assert not torch.is_autocast_enabled("cpu")
    assert private.current_metadata() is None and CompileContext.try_get() is None


def quadrupled(x: Tensor) -> Tensor:
    return x * 4


def test_no_other_file_reaches_for_what_is_private_here() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("fxamp", "passes", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != ROOT / "fxamp/torch_private.py"
        for name in _names(ast.parse(path.read_text(encoding="utf-8")))
        if name in SHARP
    ]
    assert found == []


def _names(tree: ast.AST) -> Iterator[str]:
    """Every attribute and every name imported, and what ``getattr`` and its kin are given as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            yield from (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))


def test_every_function_has_a_test() -> None:
    tree = ast.parse((ROOT / "fxamp/torch_private.py").read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    used = set(_names(ast.parse(Path(__file__).read_text(encoding="utf-8"))))
    assert functions <= used


def test_a_running_backward_is_known() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[tuple[Any, int, bool]] = []

    def look(_: Tensor) -> None:
        seen.append((private.running_node(), private.running_backward(), private.keeps_graph()))

    y = x * 2
    y.register_hook(look)
    assert private.running_node() is None and private.running_backward() == -1
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert [node is y.grad_fn for node, _, _ in seen] == [True, True]
    assert seen[1][1] == seen[0][1] + 1
    assert [keeps for _, _, keeps in seen] == [True, False]


def test_nodes_tell_what_they_are() -> None:
    x = torch.ones(2, requires_grad=True)
    node: Any = (x.half() * 2).grad_fn
    assert private.gradient_dtypes(node) == [torch.float16]
    assert private.function_of(node) is None and private.autocast_dtype_of(node) is None
    leaf = (x * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert private.is_leaf(leaf) and not private.is_leaf(node)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_a_function_tells_its_autocast(dtype: torch.dtype | None) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        node = doubled(x).grad_fn
    assert private.function_of(node) is Doubled
    assert private.autocast_dtype_of(node) is dtype
    assert not private.compiled_by_aot(Doubled)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_compiled_graph_has_metadata_and_keeps_what_it_saved_if_asked(keeps: bool) -> None:
    """If not asked, torch refuses ``retain_graph=True``: with that gone, there would be nothing to keep."""
    seen: list[Any] = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(private.current_metadata())
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        assert seen[-1].bw_donated_idxs
        if keeps:
            private.keep_saved_tensors()
        return make_boxed_func(graph.forward)

    assert private.current_metadata() is None
    x = torch.rand(3, requires_grad=True)
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    with functorch_config.patch(donated_buffer=True):
        run = torch.compile(lambda x: x.sin().exp().tanh(), backend=backend, fullgraph=True)
        run(x).sum().backward()  # compiles a backward that need not keep anything
        y = run(x)
        function = private.function_of(y.grad_fn)
        assert private.compiled_by_aot(function)
        assert private.subclass_metadata(function) is None and hasattr(function, "maybe_subclass_metadata")
        assert private.graph_metadata(function) == [seen[-1], None]
        with nullcontext() if keeps else pytest.raises(RuntimeError, match="retain_graph"):
            y.sum().backward(retain_graph=True)


def test_a_backward_that_is_compiled_late_finds_its_metadata() -> None:
    seen: list[Any] = []

    def compiler(gm: Any, _: Any) -> Any:
        again = private.compiling_again()

        def run(args: list[Any]) -> Any:
            if private.running_node() is not None:
                with again():
                    TracingContext.get().fw_metadata = None
                    with private.running_metadata():
                        seen.append((private.current_metadata(), private.donated_inputs()))
                    assert private.current_metadata() is None and private.donated_inputs() is None
            return gm.forward(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    y = torch.compile(quadrupled, backend=aot_autograd(fw_compiler=compiler))(torch.ones(2, requires_grad=True))
    metadata = private.graph_metadata(private.function_of(y.grad_fn))[0]
    y.register_hook(lambda _: private.keep_if_retained(y.grad_fn))
    y.sum().backward(retain_graph=True)
    assert metadata.bw_donated_idxs == []
    metadata.bw_donated_idxs = [0]
    private.keep_if_retained(y.grad_fn)
    assert metadata.bw_donated_idxs == [0], "its kernels are already compiled for it"
    assert [given for given, _ in seen] == [metadata]


def test_the_cache_takes_backwards_and_says_what_it_does_not_take() -> None:
    gm = make_fx(lambda x: x * 2)(torch.ones(2))
    with inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=True):
        assert private.stores_backwards() and private.is_cacheable(gm)
        next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor))).target = quadrupled
        assert not private.is_cacheable(gm)
        with private.storing_backwards():
            assert functorch_config.bundled_autograd_cache and functorch_config.force_non_lazy_backward_lowering
            assert not private.stores_backwards()
        with functorch_config.patch(enable_autograd_cache=False):
            assert not private.stores_backwards()
    assert isinstance(private.uncacheable("why"), BypassAOTAutogradCache)


def test_a_graph_is_stored_with_values_and_annotations() -> None:
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.ones(3, 4), torch.empty_strided((2, 4), (1, 2))]
    made = make_fx(lambda x, y: x.sum() * y, tracing_mode="fake")(*inputs)
    for node in made.graph.nodes:
        node.meta.update(nn_module_stack={"1": ("L['self'].head", nn.Linear)}, source_fn_stack=threading.Lock())
    loaded, examples = private.load_graph(private.dump_graph(made, inputs), FakeTensorMode())
    assert private._text(loaded) == private._text(made)
    assert [value.stride() for value in examples] == [value.stride() for value in inputs]
    kind = private._qualified(nn.Linear)
    assert all(node.meta["nn_module_stack"] == {"1": ("L['self'].head", kind)} for node in loaded.graph.nodes)
    assert torch.equal(loaded(torch.ones(3, 4), torch.ones(2, 4)), torch.full((2, 4), 12.0))


def test_a_graph_of_dynamic_sizes_is_not_stored() -> None:
    made = make_fx(lambda x: x * x.shape[0], tracing_mode="symbolic")(torch.ones(3, 4))
    (given,) = made.graph.find_nodes(op="placeholder")
    assert private.is_dynamic(given.meta["val"]) and not private.is_dynamic(torch.ones(2))
    with pytest.raises(ValueError, match="dynamic sizes"):
        private.dump_graph(made, [])


def test_a_graph_that_is_not_restored_as_it_was_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = private.dump_graph(make_fx(lambda x: x * 2)(torch.ones(2)), [])
    monkeypatch.setattr(private, "_text", lambda _: "other")
    with pytest.raises(ValueError, match="not restored as it was"):
        private.load_graph(stored, FakeTensorMode())


def test_make_fxs_mode_takes_another_class() -> None:
    class Mode(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    ops: list[Any] = []

    def traced(x: Tensor) -> Tensor:
        assert isinstance(private.replace_tracing_mode(Mode), Mode)
        return x.sin()

    gm = make_fx(traced, pre_dispatch=True)(torch.ones(2))
    assert ops == [torch.ops.aten.sin.default]
    assert [n.target for n in gm.graph.find_nodes(op="call_function", target=ops[0])] == ops


def test_the_compiling_flag_is_set_and_given_back() -> None:
    assert not torch.compiler.is_compiling()
    with private.compiling_flag():
        assert torch.compiler.is_compiling()
        with private.compiling_flag():
            assert torch.compiler.is_compiling()
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_threads_that_overlap_leave_the_compiling_flag_as_it_was() -> None:
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with private.compiling_flag():
            inside.set()
            leave.wait(timeout=60)

    def second() -> None:
        inside.wait(timeout=60)
        with private.compiling_flag():
            done.set()

    done = threading.Event()
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    inside.wait(timeout=60)
    overlapped = done.wait(timeout=0.2)
    leave.set()
    for thread in threads:
        thread.join(timeout=60)
    assert not overlapped and done.is_set()
    assert not torch.compiler.is_compiling()


def test_without_autocast_nothing_is_cast() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with private.without_autocast():
            assert (x @ x).dtype is torch.float32
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert (x @ x).dtype is torch.bfloat16


def test_saved_tensors_hooks_see_nothing_inside() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with private.without_saved_tensors_hooks():
            x.sin()
        assert packed == []
        x.sin()
    assert len(packed) == 1


def test_a_guard_recompiles_and_is_asked_on_each_call() -> None:
    graphs: list[Any] = []
    state = {"version": 0}

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        version = state["version"]
        private.guard_current_graph("__version_is_unchanged", lambda: state["version"] == version)
        graphs.append(gm)
        return gm.forward

    function = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
    counts = []
    for version in (0, 0, 1, 1):
        state["version"] = version
        function(torch.ones(2))
        counts.append(len(graphs))
    assert counts == [1, 1, 2, 2]
    private.guard_current_graph("__outside", lambda: False)


def test_what_is_compiled_tells_its_backend() -> None:
    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return gm

    module = nn.Linear(2, 2)
    module.compile(backend=backend)

    assert private.backend_of(module._compiled_call_impl) is backend
    assert private.backend_of(torch.compile(module, backend=backend)) is backend
    assert private.backend_of(torch.compile(torch.add, backend=backend)) is backend
    assert private.backend_of(module) is None and private.backend_of(torch.add) is None


def test_an_optimizers_hooks_are_called_in_torchs_order() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    said: list[str] = []

    def say(word: str) -> Any:
        return lambda *_: said.append(word)

    handles = [
        register_optimizer_step_pre_hook(say("every pre")),
        register_optimizer_step_post_hook(say("every post")),
        optimizer.register_step_pre_hook(say("own pre")),
        optimizer.register_step_post_hook(say("own post")),
    ]
    try:
        optimizer.step()
        by_torch, said[:] = list(said), []
        for hook in [*private.step_pre_hooks(optimizer), *private.step_post_hooks(optimizer)]:
            hook(optimizer, (), {})
    finally:
        for handle in handles:
            handle.remove()
    assert len(by_torch) == 4 and said == by_torch
    assert not private.step_pre_hooks(optimizer) and not private.step_post_hooks(optimizer)


def test_a_noted_step_keeps_schedulers_quiet() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private.note_step(optimizer)
    scheduler.step()  # warns, which is an error in tests, if it does not know of the step
    silent = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        torch.optim.lr_scheduler.StepLR(silent, 1).step()


def test_the_running_wrapper_is_known(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(private.running_wrapper())
            return super().forward(x)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(Model(2, 2))
        wrapper(torch.ones(1, 2))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [wrapper]
    assert private.running_wrapper() is None


def test_an_error_passes_through_dynamo_unchanged() -> None:
    def refusing(*_: Any) -> Any:
        raise private.raised_through_dynamo(ValueError("not so"), refusing, None) from None

    with pytest.raises(ValueError, match=r"^not so$") as caught:
        torch.compile(lambda x: x + 1, backend=refusing)(torch.ones(2))
    assert type(caught.value).__qualname__ == "ValueError"


def test_the_hint_of_a_size_is_known() -> None:
    seen: list[int | None] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.extend(private.hint(value) for value in inputs if isinstance(value, torch.SymInt))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x * x.shape[0], backend=backend, dynamic=True)(torch.ones(5, 5))
    assert seen and set(seen) == {5}
    assert private.hint(3) == 3


def test_what_is_computed_again_is_not_kept() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def kept(again: bool) -> list[torch.dtype]:
        def program(x: Tensor) -> Tensor:
            with private.computed_again() if again else nullcontext():
                narrow = x.to(torch.float16)  # half of what x takes: the cheaper one to keep
            return (narrow @ narrow).float().sum()

        graphs.clear()
        compiled = aot_function(program, keep, keep, partition_fn=min_cut_rematerialization_partition)
        compiled(torch.ones(4, 4, requires_grad=True)).backward()
        (output,) = graphs[0].graph.find_nodes(op="output")
        return [node.meta["val"].dtype for node in output.args[0][1:]]

    assert kept(again=False) == [torch.float16] and kept(again=True) == [torch.float32]
    with private.computed_again():  # outside of tracing nothing happens
        assert not torch.fx.traceback.has_preserved_node_meta()
