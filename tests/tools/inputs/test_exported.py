"""``.pt2`` files of torch.export: the same decisions as the backend makes of the program; read with --trust alone."""

import zipfile
from pathlib import Path

import pytest
import torch
from support.programs.show_dumps import Conv, Gpt, Mlp, rows

from fxamp.capture import capture
from fxamp.capture.dynamo_trace import trace
from fxamp.errors import ListingError, PolicyError
from fxamp.passes.base import CastContext
from fxamp.pipeline import cast_graph
from fxamp.policy import Policy
from fxamp.reports.record import record_graph
from fxamp.tools.inputs.load import Request, load

PROGRAMS = {
    "mlp": (Mlp, lambda: torch.randn(5, 8)),
    "conv": (Conv, lambda: torch.randn(2, 3, 8, 8)),
    "gpt": (Gpt, lambda: torch.randint(32, (2, 6))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_the_decisions_that_it_gets_in_the_backend(name: str, tmp_path: Path) -> None:
    make, example = PROGRAMS[name]
    program = torch.export.export(make(), (example(),))
    file = tmp_path / "program.pt2"
    torch.export.save(program, file)
    (listing,) = load(str(file), Request(policy="cpu-bfloat16", trust=True)).graphs
    traced = trace(program, (example(),))
    policy = Policy.load("cpu-bfloat16").resolve("cpu")
    captured = capture(traced.module, traced.inputs)
    expected = record_graph(cast_graph(captured, CastContext(captured.mode, policy)), "named by the test").listing
    operations = [row for row in rows(expected) if row[0] == "call_function"]
    assert [row for row in rows(listing) if row[0] == "call_function"][: len(operations)] == operations
    assert listing.kept_before is not None


def test_dynamic_sizes_and_absent_devices(tmp_path: Path) -> None:
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    file = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Mlp(), (torch.randn(5, 8),), dynamic_shapes=sizes), file)
    (listing,) = load(str(file), Request(policy="cuda-float16", trust=True)).graphs
    assert any(isinstance(size, str) for entry in listing.entries for value in entry.values for size in value.shape)
    assert {value.device for entry in listing.entries for value in entry.values} == {"cuda"}
    assert "f16" in {entry.dtype for entry in listing.entries if entry.target == "aten::linear.default"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Mlp(), (torch.randn(5, 8),)), file)
    return file


def test_broken_archives(program: Path, tmp_path: Path) -> None:
    whole = program.read_bytes()
    program.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ListingError, match=r"program\.pt2: the archive is truncated or broken: "):
        load(str(program), Request(trust=True))
    other = tmp_path / "other.pt2"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/b", "c")
    with pytest.raises(ListingError, match=r"other\.pt2: no program of torch.export can be read from it: ") as caught:
        load(str(other), Request(trust=True))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["archive", "pickle", "library"])
def test_torch_reads_nothing_without_trust(
    content: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content != "archive":
        with zipfile.ZipFile(program, "a") as archive:
            name = {"pickle": "opaque_obj_0/x", "library": "aotinductor/m/abc.wrapper.so"}[content]
            archive.writestr(f"program/data/{name}", b"")
    monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("torch was given the file"))
    renamed = tmp_path / "program.txt"
    program.rename(renamed)
    renamed.with_suffix(".py").write_bytes(renamed.read_bytes())
    program.write_bytes(renamed.read_bytes())
    for file in (program, renamed, renamed.with_suffix(".py")):
        with pytest.raises(ListingError, match=r"torch runs code that a \.pt2 holds .* accepted with --trust"):
            load(str(file), Request())


def test_the_policy_must_exist(program: Path) -> None:
    with pytest.raises(PolicyError, match="cuda-float61"):
        load(str(program), Request(policy="cuda-float61"))
    assert Policy.load("cuda-float16").device == "cuda"
