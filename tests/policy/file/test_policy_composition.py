"""Shipped policies are composed of their names' parts: which names there are, and which files each is made of."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxamp.errors import PolicyError
from fxamp.policy import Category, Policy, built_in_names, variant_names
from fxamp.policy.file import paths
from fxamp.policy.file.parse import read
from fxamp.policy.file.paths import folder
from fxamp.policy.file.shipped import composition

RULE = '[[rule]]\nid = "more"\ncast = "fp32"\nops = ["gelu"]\n'


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the folder of shipped policies, in its place."""
    copy = tmp_path / "shipped"
    shutil.copytree(folder(), copy)
    monkeypatch.setattr(paths, "files", lambda package: copy)
    for function in (folder, paths._shown_files, variant_names):
        function.cache_clear()
    yield copy
    monkeypatch.undo()
    for function in (folder, paths._shown_files, variant_names):
        function.cache_clear()


def variant(*of: str) -> str:
    return f'[variant]\nof = {list(of)}\nwhat = "gelu in float32"\n'


def test_a_new_variant_is_one_file(shipped: Path) -> None:
    (shipped / "wide-gelu.toml").write_text(variant("cuda-float16", "cpu-bfloat16-lean") + RULE)
    names = {"cuda-float16-wide-gelu", "cpu-bfloat16-wide-gelu"}
    assert {name for name in variant_names() if name.endswith("-wide-gelu")} == names
    for name in names:
        assert Policy.load(name).rules[-1].cast is Category.FP32
    assert Policy.load("cpu-bfloat16-wide-gelu").rules[:-1] == Policy.load("cpu-bfloat16-lean").rules
    with pytest.raises(PolicyError, match=r"no policy is named 'mps-float16-wide-gelu' \(did you mean '.*-wide-gelu'"):
        Policy.load("mps-float16-wide-gelu")


def test_a_variant_s_file_for_a_device_wins_there(shipped: Path) -> None:
    (shipped / "wide.toml").write_text(variant("cuda-float16") + RULE)
    (shipped / "wide-cpu.toml").write_text(f'extends = ["wide.toml"]\n{variant("cpu-float16")}{RULE}why = "The CPU."\n')
    assert [Policy.load(f"{device}-float16-wide").rules[-1].why for device in ("cuda", "cpu")] == ["", "The CPU."]
    for name in ("cpu-float16-wide-cpu", "cuda-float16-wide-cpu", "cpu-bfloat16-wide", "cuda-bfloat16-wide"):
        with pytest.raises(PolicyError, match=f"no policy is named '{name}'"):
            Policy.load(name)


@pytest.mark.parametrize(
    "name", [name for name in variant_names() if name.startswith(("cpu-bfloat16", "cuda-float16"))]
)
def test_a_change_in_any_of_its_files_changes_the_digest(name: str, shipped: Path) -> None:
    policy = Policy.load(name)
    files = [Path(source) for source in policy.sources]
    assert len(files) > 1 and {Path(r.origin.file).name for r in policy.rules if r.origin} <= {f.name for f in files}
    for file in files:
        text = file.read_text()
        file.write_text(f"{text}\n{RULE}")
        assert Policy.load(name).digest != policy.digest, file
        file.write_text(text)
    assert Policy.load(name).digest == policy.digest


def test_each_policy_that_a_variant_names_has_the_variant() -> None:
    tables = [(path, read(path).variant) for path in sorted(folder().glob("*.toml"))]
    assert sum(table is not None for _, table in tables) == 16
    shipped = {*built_in_names(), *variant_names()}
    assert [(path.name, base) for path, table in tables if table for base in table.of if base not in shipped] == []
    files = [parts.extends[-1] for name in variant_names() if (parts := composition(name)) is not None]
    assert sorted(files) == sorted(path.name for path, table in tables if table for _ in table.of)


@pytest.mark.parametrize("name", ["cpu-float16", "cuda-bfloat16-leanest"])
def test_a_shipped_name_can_be_extended_with_and_without_its_ending(name: str, tmp_path: Path) -> None:
    for ending in ("", ".toml"):
        (tmp_path / "mine.toml").write_text(f'extends = ["{name}{ending}"]\n')
        assert Policy.load(tmp_path / "mine.toml") == Policy.load(name) == Policy.load(folder() / f"{name}.toml")
    (tmp_path / f"{name}.toml").write_text(f'extends = ["cpu-bfloat16"]\n{RULE}')  # a file that is there wins
    assert Policy.load(tmp_path / "mine.toml").rules[-1].id == "more"
