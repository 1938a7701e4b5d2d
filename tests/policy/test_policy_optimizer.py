"""``[optimizer]``: read, merged, written back, compared, and its mistakes named."""

import logging
from pathlib import Path

import pytest

from fxamp.errors import PolicyError
from fxamp.policy import OptimizerPrecision, Policy
from fxamp.policy.diff.policy_diff import diff_policies

HEAD = 'extends = ["cpu-bfloat16"]\n'
TEXT = (
    HEAD + '[optimizer]\nstate = { exp_avg = "8bit", "*" = "bfloat16" }\nrounding = "stochastic"\nweights = "kahan"\n'
)


def test_the_table_is_read_and_written_back() -> None:
    policy = Policy.loads(TEXT)
    assert policy.optimizer == OptimizerPrecision({"exp_avg": "8bit", "*": "bfloat16"}, "stochastic", "kahan")
    assert [policy.optimizer.stored_as(name) for name in ("exp_avg", "exp_avg_sq")] == ["8bit", "bfloat16"]
    assert Policy.loads(policy.dumps()) == policy
    assert "# policy:2" not in policy.dumps(origins=True) and "# policy:3" in policy.dumps(origins=True)


def test_one_word_stands_for_all_states() -> None:
    policy = Policy.loads(HEAD + '[optimizer]\nstate = "8bit"\n')
    assert policy.optimizer == OptimizerPrecision("8bit")  # type: ignore[arg-type]
    assert policy.optimizer is not None and policy.optimizer.stored_as("momentum_buffer") == "8bit"
    assert 'state = "8bit"' in policy.dumps()
    assert OptimizerPrecision({"exp_avg": "8bit"}).stored_as("exp_avg_sq") == "float32"


def test_steps_in_the_backward_are_read_written_and_compared() -> None:
    policy = Policy.loads(HEAD + "[optimizer]\nin_backward = true\n")
    assert policy.optimizer == OptimizerPrecision(in_backward=True) != OptimizerPrecision()
    assert "in_backward = true" in policy.dumps() and Policy.loads(policy.dumps()) == policy
    plain = Policy.loads(HEAD + "[optimizer]\n")
    assert policy.digest != plain.digest and "in_backward" not in plain.dumps()
    assert [change.key for change in diff_policies(plain, policy).settings] == ["optimizer.in_backward"]


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TEXT)
    (tmp_path / "b.toml").write_text('extends = ["a.toml"]\n[optimizer]\nrounding = "nearest"\n')
    precision = Policy.load(tmp_path / "b.toml").optimizer
    assert precision == OptimizerPrecision({"exp_avg": "8bit", "*": "bfloat16"}, "nearest", "kahan")


def test_it_counts_in_equality_and_differences() -> None:
    plain, mine = Policy.loads(HEAD), Policy.loads(TEXT)
    assert plain != mine and plain.digest != mine.digest and hash(mine) == hash(Policy.loads(TEXT))
    diff = diff_policies(plain, mine)
    assert not diff.same
    assert [change.key for change in diff.settings] == ["optimizer.state", "optimizer.rounding", "optimizer.weights"]
    assert diff_policies(plain, Policy.loads(HEAD + "[optimizer]\n")).same


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('state = "8bits"', r":3: state = '8bits' is unknown; accepted: 'float32', .* \(did you mean '8bit'\?\)"),
        ('state = { exp_avg = "fp8" }', r":3: state.exp_avg = 'fp8' is unknown"),
        ("state = 8", r":3: state = 8 has the wrong type; accepted: a string, or a table of strings"),
        ('rounding = "random"', r":3: rounding = 'random' is unknown; accepted: 'nearest', 'stochastic'"),
        ('weights = "kahn"', r":3: weights = 'kahn' is unknown; .* \(did you mean 'kahan'\?\)"),
        ("in_backward = 1", r":3: in_backward = 1 has the wrong type; accepted: true or false"),
        (
            'in_backward = true\nstate = "8bit"',
            r":4: state = '8bit' does not go with in_backward = true; accepted with it: 'float32'",
        ),
        (
            'in_backward = true\nrounding = "stochastic"',
            r":4: rounding = 'stochastic' does not go with in_backward = true; accepted with it: 'nearest'",
        ),
        (
            'in_backward = true\nweights = "kahan"',
            r":4: weights = 'kahan' does not go with in_backward = true; accepted with it: 'as-is'",
        ),
        ('round = "nearest"', r":3: unknown key 'round' in \[optimizer\]; .*did you mean 'rounding'"),
    ],
)
def test_mistakes_are_named_with_their_line(line: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.loads(HEAD + "[optimizer]\n" + line + "\n")
    with pytest.raises(PolicyError, match="optimizer: weights = 'x'"):
        OptimizerPrecision(weights="x")


def test_the_old_word_is_accepted_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fxamp.policy"):
        policy = Policy.loads(HEAD + '[optimizer]\nstate = { exp_avg = "int8" }\n')
        assert policy.optimizer == OptimizerPrecision({"exp_avg": "8bit"})
    assert "'int8' is now called '8bit'" in caplog.text
    assert 'exp_avg = "8bit"' in policy.dumps()
