"""A graph's text that computes without end is refused, by name; what graphs compute is not."""

import signal
from pathlib import Path

import pytest
from support.checks.exhaustive import exhaustive

from fxamp.errors import ListingError
from fxamp.tools.inputs import limits
from fxamp.tools.inputs.load import Request, load

HEAD = "class GraphModule(torch.nn.Module):\n    def forward(self, {}):\n"
X = 'x: "f32[4, 4]"'


def read(tmp_path: Path, *lines: str, inputs: str = X) -> int:
    """Return how many entries the graph of ``lines`` has under a policy."""
    file = tmp_path / "graph.txt"
    result = '        w: "f32[4, 4]" = torch.ops.aten.mul.Tensor(x, 2)\n        return (w,)\n'
    file.write_text(HEAD.format(inputs) + "".join(f"        {line}\n" for line in lines) + result)
    return len(load(str(file), Request(policy="cpu-bfloat16")).graphs[0].entries)


ENDLESS = {
    "a power": ["v = pow(9, 99999999999)"],
    "a power of a size": ["n = x.size(0)", "v = n ** 99999999999"],
    "a power as a method": ["n = x.size(0)", "v = n.__pow__(99999999999)"],
    "a reflected power": ["n = x.size(0)", "v = n.__rpow__(2)", "u = operator.pow(9, 99999999999)"],
    "a power in place": ["n = x.size(0)", "v = operator.ipow(n, 99999999999)"],
    "a shift": ["v = operator.lshift(1, 99999999999)"],
    "squares of squares": ["a0 = x.size(0)", *(f"a{at + 1} = a{at} * a{at}" for at in range(60))],
    "a long list": ["v = operator.mul([1], 99999999999)"],
    "lists of lists": [
        "a0 = x.size(0)",
        *(f"a{at + 1} = operator.getitem([a{at}, a{at}], slice(None))" for at in range(60)),
    ],
    "lists that double": [
        "a0 = operator.getitem([1, 2], slice(None))",
        *(f"a{at + 1} = a{at} + a{at}" for at in range(60)),
    ],
    "a long text": ["v = operator.mod('%99999999999d', 5)"],
    "rounding to nothing": ["v = round(5, -99999999999)"],
}


@pytest.mark.parametrize("name", exhaustive(ENDLESS, always=ENDLESS.keys() - {"lists of lists"}))
def test_numbers_without_end_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ListingError, match=r"graph\.txt: \w+ computes (a number of|a sequence of|text of)"):
        read(tmp_path, *ENDLESS[name])


@pytest.mark.parametrize(
    "size",
    [
        "9**9**9**9",
        "9" * 90,
        "PowByNatural(9, 99999999999)",
        "(" * 12 + "9" + "**16)" * 12,
        "1 << 99999999999",
        "s0 + 9**16**16",
        "*".join(["9999999999"] * 30),
    ],
)
def test_sizes_without_end_are_refused(size: str, tmp_path: Path) -> None:
    with pytest.raises(ListingError, match=r"graph\.txt: "):
        read(tmp_path, inputs=f'{X}, y: "f32[{size}, 4]"')


def test_what_graphs_compute_is_computed(tmp_path: Path) -> None:
    lines = ["n = x.size(0)", "m = n ** 2", "k = m * 3", "h = k // 2", "s = operator.lshift(n, 4)", "r = round(2.5, 1)"]
    assert read(tmp_path, *lines, "z = x.view(n, -1)", "y = torch.ops.aten.sum.default(x)") >= 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where it interrupts a destructor
def test_time_and_memory_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGPROF)
    wide = 'x: "f32[4, 4]", y: "f32[1000000000]"'
    for name, value in (("SECONDS", -1.0), ("BYTES", -(2**40))):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, value)
            patch.setattr(limits, "_PERIOD", 0.01)
            with pytest.raises(ListingError, match=r"graph\.txt: computing the types of its values takes more than"):
                read(tmp_path, "parts = torch.split(y, 1)", inputs=wide)
    assert signal.getsignal(signal.SIGPROF) == before and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


class _Swallowing:
    """Its destructor computes until it is interrupted; Python ignores the exception."""

    def __del__(self) -> None:
        _compute()


def _compute() -> None:
    while True:
        sum(range(1000))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_that_a_destructor_swallows_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SECONDS", -1.0), ("_PERIOD", 0.01), ("_RETRY", 0.05)):
        monkeypatch.setattr(limits, name, value)
    with pytest.raises(ListingError, match=r"takes more than"), limits.limited(1, "graph.txt"):
        one = _Swallowing()
        del one
        _compute()
