"""A policy file stays the same file, and while it is broken, as it was; a changed policy never meets an old graph."""

import logging
import os
import random
from pathlib import Path

import cached_product
import pytest
import torch
from support.machines.forked import printed_by
from support.machines.lacks import needs_compiler
from support.oracles.like_autocast import compile_with

from fxamp import Policy
from fxamp.backend import policy_in_force
from fxamp.reports import registry
from fxamp.reports.warnings import warn_once

LOW = """
lower_precision_fp = "{dtype}"
[match]
device = "cpu"
[[rule]]
id = "products"
cast = "{cast}"
ops = ["matmul"]
why = "a test"
"""
NARROW = LOW.format(cast="lower_precision_fp", dtype="bfloat16")
WIDE = LOW.format(cast="fp32", dtype="bfloat16").replace('why = "a test"', 'why = "a tes"')
assert len(NARROW) - len(WIDE) == len("lower_precision_fp") - len("fp32") + 1
SAME_SIZE = WIDE + "#" * (len(NARROW) - len(WIDE))
X = torch.full((2, 2), 1 + 2**-10)
EXACT = X @ X


def program(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """A folder with a policy in 16 bits, where the program starts; one with a namesake in float32; an empty one."""
    one, other, empty = (tmp_path / name for name in ("one", "other", "empty"))
    for folder in (one, other, empty):
        folder.mkdir()
    (one / "p.toml").write_text(NARROW)
    (other / "p.toml").write_text(WIDE)
    monkeypatch.chdir(one)
    return one, other, empty


@pytest.mark.parametrize("environment", [False, True])
def test_a_relative_path_stays_the_same_file(
    environment: bool, folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv("FXAMP_POLICY", "p.toml")
    compiled = compile_with(program, "eager", **({} if environment else {"policy": "p.toml"}))
    narrow = compiled(X)
    assert not torch.equal(narrow, EXACT)
    for folder in folders[1:]:
        os.chdir(folder)
        assert torch.equal(compiled(X), narrow)
    larger = torch.full((3, 3), 1 + 2**-10)
    assert not torch.equal(compiled(larger), larger @ larger)  # compiled again, in the empty folder


def test_equal_options_in_another_folder_mean_the_file_there(folders: tuple[Path, Path, Path]) -> None:
    options = {"policy": "p.toml", "lowering": "eager"}
    assert not torch.equal(torch.compile(program, backend="fxamp", options=options)(X), EXACT)
    os.chdir(folders[1])
    assert torch.equal(torch.compile(program, backend="fxamp", options=dict(options))(X), EXACT)


def test_contents_decide_where_size_and_times_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(NARROW)
    compiled = compile_with(program, "eager", policy=str(path))
    assert not torch.equal(compiled(X), EXACT)
    before = path.stat()
    monkeypatch.setattr(
        policy_in_force, "_status_of", lambda _: (before.st_ctime_ns, before.st_mtime_ns, before.st_size)
    )
    path.write_text(SAME_SIZE)
    assert path.stat().st_size == before.st_size
    assert torch.equal(compiled(X), EXACT)


def test_an_old_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(NARROW)
    monkeypatch.setattr(policy_in_force, "_TICK", -(10**12))  # as if it had been written long ago
    compiled = compile_with(program, "eager", policy=str(path))
    compiled(X)
    monkeypatch.setattr(policy_in_force, "_contents", lambda _: pytest.fail("read again"))
    compiled(X)


@pytest.mark.parametrize("broken", [None, "", NARROW[: len(NARROW) // 2], "\x00", NARROW.replace('"cpu"', '"cuda"')])
def test_a_file_that_breaks_holds_as_it_was(
    broken: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(NARROW)
    compiled = compile_with(program, "eager", policy=str(path))
    narrow = compiled(X)
    graphs = registry.count()
    warn_once.cache_clear()
    path.unlink() if broken is None else path.write_text(broken)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(compiled(X), narrow) and torch.equal(compiled(X), narrow)
        assert registry.count() == graphs
        larger = torch.full((3, 3), 1 + 2**-10)
        assert not torch.equal(compiled(larger), larger @ larger)  # compiled again, while the file is broken
    (record,) = (record for record in caplog.records if record.name == policy_in_force.__name__)
    assert "mine.toml" in record.getMessage() and "stays in force" in record.getMessage()
    path.write_text(WIDE)
    assert torch.equal(compiled(X), EXACT)


def test_a_file_for_a_gpu_may_become_one_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxamp.backend.policy_choice.has_gpu", lambda _: True)
    path = tmp_path / "mine.toml"
    path.write_text(NARROW.replace('"cpu"', '"cuda"'))
    compiled = compile_with(program, "eager", policy=str(path))
    assert torch.equal(compiled(X), EXACT)
    path.write_text(NARROW)
    assert not torch.equal(compiled(X), EXACT)


def test_a_new_comment_compiles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(NARROW)
    compiled = compile_with(program, "eager", policy=str(path))
    compiled(X)
    graphs = registry.count()
    path.write_text("# new\n" + NARROW)
    compiled(X)
    assert registry.count() == graphs


def test_a_change_while_the_graph_is_compiled_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(NARROW)
    policy = policy_in_force.load_here(str(path), torch.device("cpu"))
    path.write_text(WIDE)
    assert not policy_in_force.Unchanged(str(path), torch.device("cpu"), policy)()


def test_an_edit_of_an_extended_file_counts(tmp_path: Path) -> None:
    base, path = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text(NARROW)
    path.write_text('extends = ["base.toml"]\n')
    compiled = compile_with(program, "eager", policy=str(path))
    assert not torch.equal(compiled(X), EXACT)
    base.write_text(WIDE)
    assert torch.equal(compiled(X), EXACT)


def test_policies_are_compared_by_content() -> None:
    compiled = compile_with(program, "eager", policy=Policy.load("cpu-bfloat16"))
    compiled(X)
    before = registry.count()
    torch.compile(program, backend="fxamp", options={"policy": Policy.load("cpu-bfloat16"), "lowering": "eager"})(X)
    assert registry.count() == before
    torch.compile(program, backend="fxamp", options={"policy": Policy.load("cpu-float16"), "lowering": "eager"})(X)
    assert registry.count() == before + 1


def test_the_environment_names_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    compiled = torch.compile(program, backend="fxamp", options={"lowering": "eager"})
    monkeypatch.setenv("FXAMP_POLICY", "cpu-bfloat16")
    assert not torch.equal(compiled(X), EXACT)
    monkeypatch.delenv("FXAMP_POLICY")
    assert torch.equal(compiled(X), EXACT)


@pytest.mark.exhaustive
@needs_compiler
def test_warm_caches_of_another_process_are_not_stale(tmp_path: Path) -> None:
    path, edited = tmp_path / "mine.toml", tmp_path / "edited.toml"
    factor = random.SystemRandom().randrange(2**20) / 2**10  # no run before this one has compiled it
    path.write_text(NARROW)
    edited.write_text(WIDE)
    assert cached_product.product(str(path), factor) == (False, False)
    printed = printed_by(cached_product.__file__, str(path), str(factor), str(edited))
    assert printed == ["False True", "True False"]
