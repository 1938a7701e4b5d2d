"""fxamp-bench finds its subcommands, and answers what is none."""

import importlib.util

import pytest
import torch
from commands import mistake, run_command

from fxamp.tools.bench import command as bench

WITH_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton's compiler")
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize("name", bench.SUBCOMMANDS)
def test_every_subcommand_has_a_parser_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main([name, "--help"])
    assert stop.value.code == 0 and f"usage: fxamp-bench {name}" in capsys.readouterr().out


def test_without_a_subcommand_it_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(bench.main, [], capsys)
    assert (status, out) == (2, "") and all(name in err for name in bench.SUBCOMMANDS)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("polices", "'policies'"),
        ("train --model gpt2", "'gpt2-124m'"),
        ("train --contenders fxamp,compile-autocst", "'compile-autocast'"),
        ("train --set widht=3", "'width'"),
        ("train --set width", "NAME=N"),
        ("train --contenders fxamp --baseline eager-float32", "none of the contenders"),
        ("train --steps 0", "'0'"),
        ("train --dtype float61", "'float16'"),
        ("train --optimizer NAdem", "'NAdam'"),
        ("train --clip -1", "'-1'"),
        ("train --contenders fxamp-skip-device", "float16"),
        ("step --contenders fussed", "(did you mean 'fused'?)"),
        ("step --optimizer AdamsW", "(did you mean 'AdamW'?)"),
        ("step --parameters 0", "'0' is not a whole number of 1 or more"),
        ("step --lowering eager", "'eager'"),
        ("cost --every --model mlp", "--every counts all models"),
        ("cost --policy cuda-flot16", "cuda-float16"),
        ("cost nowhere.py", "nowhere.py: there is no such file"),
        ("cost nowhere.py --layers 2", "--layers are for the models"),
        ("cost --optimizer AdamX", "AdamW"),
        ("policies --policy cuda-bfloat16-laen", "did you mean 'cuda-bfloat16-lean'"),
        ("check --device cpu --only unscael", "no check's name holds it"),
        ("kernels --devic x", "'--devic'"),
        ("kernels --json --markdown", "not allowed with"),
        pytest.param("kernels --arch sm90", "did you mean 'sm_90'", marks=WITH_TRITON),
        *(
            pytest.param(f"{name} --device cuda", "no CUDA device", marks=WITHOUT_GPU)
            for name in ("check", "train", "step")
        ),
    ],
)
def test_a_wrong_option_is_one_clear_message(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in mistake(bench.main, line.split(), capsys)
