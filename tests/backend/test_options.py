"""Options are checked before anything is traced, and say what is accepted."""

import traceback
from pathlib import Path

import pytest
import torch
from support.oracles.like_autocast import compile_with

from fxamp.backend.options import parse_options
from fxamp.backend.policy_choice import choose_policy
from fxamp.errors import OptionError, PolicyError

WRONG = {
    "unknown option": (
        {"polcy": "auto"},
        OptionError,
        r"option 'polcy' \(did you mean 'policy'\?\); accepted: ",
    ),
    "policy of the wrong type": ({"policy": 3}, OptionError, "'policy' is 3, of type int; accepted: \"auto\""),
    "unknown lowering": ({"lowering": "induct"}, OptionError, r"'induct' \(did you mean 'inductor'\?\)"),
    "placement is no option": (
        {"placement": "autocast"},
        OptionError,
        r"unknown option 'placement'; accepted: policy",
    ),
    "unknown Inductor setting": ({"inductor": {"max_autotun": 1}}, OptionError, r"did you mean 'max_autotune'\?"),
    "inductor of the wrong type": ({"inductor": 1}, OptionError, "of type int; accepted: a dict"),
    "unknown answer to what is not finite": (
        {"nonfinite": "rais"},
        OptionError,
        r"did you mean 'raise'\?\); accepted: ",
    ),
    "unknown mode": ({"mode": "max-autotun"}, OptionError, r"did you mean 'max-autotune'\?"),
    "Inductor's mode elsewhere": ({"mode": "max-autotune", "lowering": "eager"}, OptionError, "is Inductor's"),
    "unknown policy": ({"policy": "cpu-bf16"}, PolicyError, r"did you mean 'cpu-bfloat16'\?"),
    "missing file": ({"policy": "nowhere.toml"}, PolicyError, "nowhere.toml"),
    "policy of another device": ({"policy": "cuda-float16"}, PolicyError, "is for device 'cuda', but .* 'cpu'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_refused_before_tracing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, kind, message = WRONG[case]
    monkeypatch.setattr("fxamp.backend.compilation.capture", lambda *_: pytest.fail("traced too early"))
    with pytest.raises(kind, match=message) as caught:
        torch.compile(lambda x: x + 1, backend="fxamp", options=options)(torch.ones(2, requires_grad=True))
    last = "".join(traceback.format_exception(caught.value)).rstrip().splitlines()[-1]
    assert last == f"fxamp.errors.{kind.__name__}: {caught.value}"
    assert isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed)


def test_a_part_on_the_cpu_of_a_model_on_a_gpu_is_not_cast(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxamp.backend.policy_choice.has_gpu", lambda _: True)
    options, x = {"policy": "cuda-bfloat16"}, torch.ones(2, 2)
    assert torch.compile(lambda x: x @ x, backend="fxamp", options=options)(x).dtype is torch.float32
    assert "all its tensors are on the CPU, and policy 'cuda-bfloat16' is for device 'cuda'" in caplog.text
    with pytest.raises(PolicyError, match=r"is for device 'cuda', but .* 'cpu'"):
        torch.compile(torch.nn.Linear(2, 2), backend="fxamp", options=options)(x)


def test_contradicting_modes_are_refused() -> None:
    with pytest.raises(OptionError, match="contradict"):
        parse_options({"mode": "max-autotune"}, mode="reduce-overhead")


def test_auto_without_bfloat16_units_casts_nothing_and_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    for _ in range(2):
        choice = choose_policy(parse_options({}), [torch.ones(2)])
        assert choice.policy is None and "no native bfloat16" in choice.why
    assert sum("chose float32" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("unit", ["avx512_bf16", "amx_bf16", "bf16"])
def test_auto_takes_bfloat16_where_it_is_native(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, unit: True})
    choice = choose_policy(parse_options({}), [torch.ones(2)])
    assert choice.policy is not None and choice.policy.name == "cpu-bfloat16"


@pytest.mark.inductor
def test_torch_compiles_mode_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as inductor

    patches: list[object] = []

    def spy(gm: torch.fx.GraphModule, *_: object, config_patches: object = None, **__: object) -> object:
        patches.append(config_patches)
        return gm.forward

    monkeypatch.setattr(inductor, "compile_fx", spy)
    compiled = torch.compile(lambda x: x @ x, backend="fxamp", mode="reduce-overhead", options=None)
    compiled(torch.ones(2, 2))
    assert patches == [{"triton.cudagraphs": True}]


def test_a_users_rule_that_matches_nothing_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where rules come from must not depend on it
    path = tmp_path / "mine.toml"
    path.write_text('extends = ["cpu-bfloat16"]\n[[rule]]\nid = "typo"\ncast = "fp32"\nops = ["matmull"]\nwhy = "x"\n')
    for _ in range(2):
        compile_with(lambda x: x @ x, "eager", policy=str(path))(torch.ones(2, 2))
    warnings = [message for message in caplog.messages if "matched no op" in message]  # not one of cpu.toml's
    assert len(warnings) == 1 and "'typo'" in warnings[0] and "mine.toml:2" in warnings[0]
