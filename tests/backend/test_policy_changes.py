"""A changed policy never meets a graph that was compiled with the old one."""

import os
import random
from pathlib import Path

import cached_product
import pytest
import torch
from forked import printed_by
from like_autocast import compile_with

from fxamp import Policy
from fxamp.reports import registry

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


def write(path: Path, cast: str = "lower_precision_fp", dtype: str = "bfloat16") -> None:
    stamp = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(LOW.format(cast=cast, dtype=dtype))
    os.utime(path, ns=(stamp + 1, stamp + 1))


def program(x: torch.Tensor) -> torch.Tensor:
    return x @ x


X = torch.full((2, 2), 1 + 2**-10)
EXACT = X @ X


def test_an_edit_of_an_extended_file_counts(tmp_path: Path) -> None:
    base, path = tmp_path / "base.toml", tmp_path / "mine.toml"
    write(base)
    path.write_text('extends = ["base.toml"]\n')
    compiled = compile_with(program, "eager", policy=str(path))
    assert not torch.equal(compiled(X), EXACT)
    write(base, cast="fp32")
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
@pytest.mark.inductor
def test_warm_caches_of_another_process_are_not_stale(tmp_path: Path) -> None:
    path, edited = tmp_path / "mine.toml", tmp_path / "edited.toml"
    factor = random.SystemRandom().randrange(2**20) / 2**10  # no run before this one has compiled it
    write(path)
    write(edited, cast="fp32")
    assert cached_product.product(str(path), factor) == (False, False)
    printed = printed_by(cached_product.__file__, str(path), str(factor), str(edited))
    assert printed == ["False True", "True False"]
