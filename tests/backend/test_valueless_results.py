"""Results that a policy drops: the caller gets their form, an error for their values, and the same gradients."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from support.machines.lacks import needs_compiler
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp
from fxamp.backend.valueless_results import ValuelessTensor
from fxamp.errors import DroppedResultError
from fxamp.policy import Policy

TEXT = """
extends = ["cpu-bfloat16"]
[match]
device = "cpu"
[[rule]]
id = "cut"
ops = ["cross_entropy_loss"]
chunks = 4
[[rule]]
id = "no-logits"
drop = true
modules = ["lm_head"]
"""
POLICY = Policy.loads(TEXT, "mine.toml")
LINE = 9


class NanoGPT(nn.Module):
    """As nanoGPT: ``(logits, loss)``, and the logits of the last token where there are no targets."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx).tanh()
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def compiled(lowering: str = "aot_eager", module: nn.Module | None = None, under: Any = POLICY, **others: Any) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = NanoGPT() if module is None else module
    model.compile(backend="fxamp", options={"policy": under, "lowering": lowering}, **others)
    return model


def batch(rows: int = 4) -> Tensor:
    return torch.arange(rows * 3).view(rows, 3) % 12


@pytest.mark.parametrize(
    "lowering",
    ["eager", "aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.exhaustive])],
)
def test_gradients_are_those_with_the_results(lowering: str) -> None:
    gradients = []
    for under in (POLICY, "cpu-bfloat16"):
        model = compiled(lowering, under=under)
        logits, loss = model(batch(), batch())
        assert isinstance(logits, ValuelessTensor) == (under is POLICY)
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*gradients, rtol=2**-6, atol=2**-8)


def test_a_scaler_unscales_what_is_left() -> None:
    gradients = []
    for rules in (POLICY.rules, tuple(rule for rule in POLICY.rules if rule.region != "results")):
        scaler = fxamp.GradScaler("cpu", init_scale=1024.0)
        options = {"policy": replace(POLICY, rules=rules), "lowering": "aot_eager", "scaler": scaler}
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = NanoGPT()
        _, loss = torch.compile(model, backend="fxamp", options=options)(batch(), batch())
        scaler.scale(loss).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=2**-6, atol=2**-8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_caller_gets_shape_dtype_and_device(dynamic: bool) -> None:
    model = compiled(dynamic=dynamic)
    for rows in (4, 6, 5):
        logits, _ = model(batch(rows), batch(rows))
        assert logits.shape == logits.size() == (rows, 3, 12) and logits.dim() == 3 and len(logits) == rows
        assert logits.dtype is torch.float32 and logits.device.type == "cpu" and logits.numel() == rows * 36
        assert isinstance(logits, Tensor) and not logits.requires_grad


USES: list[Callable[[Tensor], Any]] = [
    Tensor.detach,
    Tensor.float,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.backward,
    Tensor.data_ptr,
    bool,
    list,
    copy.deepcopy,
    "{:.2f}".format,
    numpy.asarray,
    torch.empty_like,
    lambda logits: logits[0],
    lambda logits: logits.data,
    lambda logits: logits + 1,
    lambda logits: logits == logits,
    lambda logits: torch.stack([logits]),
    lambda logits: torch.ones(4, 3, 12).copy_(logits),
    lambda logits: torch.add(torch.ones(4, 3, 12), 1, out=logits),
    torch.compile(lambda logits: logits * 2, backend="eager"),
]


def test_every_use_of_the_values_raises() -> None:
    logits, _ = compiled()(batch(), batch())
    for use in USES:
        with pytest.raises(DroppedResultError, match=rf"policy 'mine.toml'.*'no-logits'.*mine.toml:{LINE}"):
            use(logits)


def test_printing_explains_why_there_are_no_values() -> None:
    """A debugger shows it."""
    logits, _ = compiled()(batch(), batch())
    assert "policy 'mine.toml' drops it" in repr({"logits": logits}) and "policy 'mine.toml' drops it" in str(logits)


def test_evaluation_and_generation_read_their_results() -> None:
    model = compiled()
    with torch.no_grad():
        logits, _ = model(batch(), batch())
    torch.testing.assert_close(logits, model.lm_head(model.wte(batch()).tanh()), rtol=2**-6, atol=2**-6)
    logits, loss = model(batch())
    assert loss is None and torch.isfinite(logits).all()


def test_a_graph_break_after_the_loss_keeps_the_results() -> None:
    class Printing(NanoGPT):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
            logits, loss = super().forward(idx, targets)
            torch._dynamo.graph_break()
            return logits * 2, loss

    logits, _ = compiled(module=Printing())(batch(), batch())
    assert torch.isfinite(logits).all()


def test_a_rewritten_module_returns_all_results() -> None:
    logits, loss = fxamp.rewrite(NanoGPT(), (batch(), batch()), POLICY)(batch(), batch())
    assert torch.isfinite(logits).all() and torch.isfinite(loss)


@pytest.mark.exhaustive
def test_transformers_return_their_own_class() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=12, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    compiled(module=model)
    output = model(input_ids=batch(), labels=batch())
    assert output.logits.shape == (4, 3, 12) and output[0] is output.loss
    output.loss.backward()
    with pytest.raises(DroppedResultError, match="no-logits"):
        output.logits.argmax(-1)
