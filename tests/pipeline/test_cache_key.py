"""What changes the generated code changes the keys of torch's caches; what does not, does not."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.fx import GraphModule, symbolic_trace

import fxamp
from fxamp.pipeline import cache_key as keys
from fxamp.pipeline.cache_key import cache_key
from fxamp.policy import Policy

BF16 = Policy.load("cpu-bfloat16")


#: Names modules here, so that no run before this one has compiled them.
RUN = f"run{random.SystemRandom().randrange(2**40)}"


class Named(nn.Module):
    """Products in float16, for which no kernel is compiled; their modules have the names given."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            self.add_module(f"{RUN}{name}", nn.Linear(16, 16, bias=False).half())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for module in self.children():
            x = module(x)
        return x, x @ x


def graph(path: str = "a", kind: object = nn.Linear, **annotations: object) -> GraphModule:
    graph = symbolic_trace(lambda x: x @ x)
    for node in graph.graph.nodes:
        node.meta.update({"nn_module_stack": {"1": (f"L['self'].{path}", kind)}, **annotations})
    return graph


def test_key_is_the_same_for_the_same_graph_elsewhere() -> None:
    first = cache_key(graph(stack_trace="one", val=1), BF16, True)
    assert first == cache_key(graph(stack_trace="two", val=2), Policy.load("cpu-bfloat16"), True)


@pytest.mark.parametrize(
    ("gm", "policy", "settings"),
    [
        (graph(), Policy.load("cpu-float16"), (True,)),
        (graph(), Policy.load("cpu-bfloat16-lean"), (True,)),
        (graph(), replace(BF16, rules=BF16.rules[:-1]), (True,)),
        (graph(), BF16, (False,)),
        (graph("b"), BF16, (True,)),
        (graph(kind="other.Linear"), BF16, (True,)),
        (graph(recompute="MUST_SAVE"), BF16, (True,)),
    ],
    ids=["dtype", "kept", "rule", "setting", "module", "class", "annotation"],
)
def test_key_depends_on(gm: GraphModule, policy: Policy, settings: tuple[object, ...]) -> None:
    assert cache_key(gm, policy, *settings) != cache_key(graph(), BF16, True)


def test_key_depends_on_the_code_of_fxamp(tmp_path: Path) -> None:
    copy = tmp_path / "fxamp"
    (copy / "passes").mkdir(parents=True)
    (copy / "tools").mkdir()
    (copy / "__init__.py").write_text('__version__ = "1"\n')

    def edited(name: str, text: str) -> bool:
        """Whether the digest is another one after a change of the file ``name``."""
        before = keys.source_digest.__wrapped__(copy)
        (copy / name).write_text(text)
        return bool(keys.source_digest.__wrapped__(copy) != before)

    assert edited("passes/a.py", "x = 1\n") and edited("passes/a.py", "x = 2\n")
    assert edited("__init__.py", '__version__ = "2"\n') and not edited("tools/b.py", "x = 1\n")
    assert keys.source_digest() == keys.source_digest.__wrapped__(Path(fxamp.__file__).parent)


def compiled_anew(options: dict[str, object], *names: str) -> str:
    """Compile the forward as a new process would, and say what AOTAutograd's cache did."""
    torch._dynamo.reset()
    counters.clear()
    torch.compile(Named(*names), backend="fxamp", options=options)(torch.ones(16, 16).half())
    counts = counters["aot_autograd"]
    return "/".join(what for what in ("hit", "miss", "bypass") if counts[f"autograd_cache_{what}"])


def scaled(policy: str, **settings: bool) -> dict[str, object]:
    return {"policy": policy, "scaler": fxamp.GradScaler("cpu", init_scale=1024.0, **settings)}  # type: ignore[arg-type]


CHANGES: dict[str, Callable[[], tuple[dict[str, object], Callable[[str], str]]]] = {
    "policy": lambda: (scaled("cpu-float16-fast"), str),
    "no scaler": lambda: ({"policy": "cpu-float16"}, str),
    "norm": lambda: (scaled("cpu-float16", graph_norm=True), str),
    "kept": lambda: (scaled("cpu-float16-lean"), str),
    "modules": lambda: (scaled("cpu-float16"), "{}_".format),
}


@pytest.mark.inductor
@pytest.mark.parametrize("change", exhaustive(tuple(CHANGES), always=("no scaler",)))
def test_a_change_misses_the_cache_and_a_repetition_hits_it(change: str) -> None:
    names = f"{change}a", f"{change}b"
    assert compiled_anew(scaled("cpu-float16"), *names) == "miss"
    assert compiled_anew(scaled("cpu-float16"), *names) == "hit"
    options, rename = CHANGES[change]()
    assert compiled_anew(options, *map(rename, names)) == "miss"
    assert compiled_anew(options, *map(rename, names)) == "hit"


@pytest.mark.inductor
@pytest.mark.parametrize("policy", exhaustive(["cpu-float16", "auto"], always=["auto"]))
def test_a_backward_that_is_compiled_when_it_runs_is_of_this_fxamp(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither torch.compile alone nor other code of fxamp has compiled it: their Inductor may generate other code."""

    def forward_and_backward(backend: str, **options: object) -> int:
        torch._dynamo.reset()
        counters.clear()
        with functorch_config.patch(enable_autograd_cache=False):
            compiled = torch.compile(lambda x: (x @ x).sin().sum(), backend=backend, options=options or None)
            compiled(torch.ones(5, 5, requires_grad=True)).backward()
        return int(counters["inductor"]["fxgraph_cache_hit"])

    forward_and_backward("inductor")
    hits = []
    for digest in ("one", RUN, RUN):
        monkeypatch.setattr(keys, "source_digest", partial(str, digest))
        hits.append(forward_and_backward("fxamp", policy=policy))
    assert hits[1:] == [0, 2]


@pytest.mark.inductor
def test_a_change_of_fxamp_itself_misses_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, object] = {"policy": "cpu-float16"}
    assert compiled_anew(options, "a") == "miss"
    monkeypatch.setattr(keys, "source_digest", lambda: "other code")
    assert compiled_anew(options, "a") == "miss"
