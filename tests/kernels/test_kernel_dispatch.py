"""Who does the work, on which devices, and what is kept between calls."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_cases import SCALES, expected, inverse, random_gradients, require_in_place, same_bits

from fxamp.errors import OptionError
from fxamp.kernels import Implementation, check_unscale, check_unscale_, dispatch, forced
from fxamp.kernels.dispatch import implementation
from fxamp.kernels.gradient_request import UnscaleRequest
from fxamp.kernels.per_device import _perform_share, perform_everywhere

CPU = torch.device("cpu")
WITHOUT_TRITON = """
import sys
import torch
before = "triton" in sys.modules
from fxamp.kernels import Implementation, dispatch, check_, check_unscale, check_unscale_, ScaleRule, update_scale_
from fxamp.kernels.dispatch import implementation
found_inf, scale, tracker = torch.zeros(()), torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
check_([torch.zeros(1)], found_inf)
assert ("triton" in sys.modules) == before, "imported where it is not needed"
sys.modules["triton"] = None
assert implementation(torch.device("cuda", 0)) is Implementation.REFERENCE
gradients = [torch.full((3,), 4.0), torch.full((2,), float("inf"))]
assert check_unscale(gradients, torch.tensor(0.5), torch.float16)[1].tolist() == [0, 1]
check_unscale_(gradients, torch.tensor(0.5), found_inf)
update_scale_(scale, tracker, found_inf, ScaleRule(2.0, 0.5, 1))
check_(gradients, found_inf)
assert (gradients[0].tolist(), found_inf.item(), scale.item()) == ([2.0] * 3, 1.0, 4.0)
"""


def test_triton_is_imported_no_earlier_than_needed_and_may_be_missing() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_TRITON], check=True, timeout=120)


def test_cpu_is_the_hosts_and_can_be_forced() -> None:
    assert implementation(CPU) is Implementation.HOST
    with forced(Implementation.INTERPRETER):
        assert implementation(CPU) is Implementation.INTERPRETER
        with forced(Implementation.REFERENCE):
            assert implementation(CPU) is Implementation.REFERENCE
        assert implementation(CPU) is Implementation.INTERPRETER
    assert implementation(CPU) is Implementation.HOST


@pytest.mark.usefixtures("implementation")
def test_shares_of_several_devices_are_brought_together() -> None:
    gradients = random_gradients(7, (torch.float16, torch.float32))
    inv_scale = torch.tensor(0.5)
    reference = expected(gradients, inv_scale)
    assert 0 < sum(reference.flags) < len(gradients)
    found_inf, flags, norm = torch.zeros(()), torch.zeros(len(gradients), dtype=torch.int32), torch.zeros(())
    work = UnscaleRequest(gradients, gradients, inv_scale, found_inf, flags, norm)
    for positions in ([0, 2, 4], [5, 1, 3]):
        _perform_share(work, positions, CPU, CPU, keep=False)
    assert flags.tolist() == reference.flags
    assert found_inf.item() == 1.0
    assert all(map(same_bits, gradients, reference.true))
    assert not norm.isfinite()


def test_a_share_for_each_device() -> None:
    """ "cpu:0" is another name of the same memory, and counts as another device."""
    gradients, found_inf = [torch.ones(3), torch.ones(2)], torch.zeros((), device="cpu:0")
    flags, norm = torch.zeros(2, dtype=torch.int32), torch.zeros(())
    perform_everywhere(
        UnscaleRequest(gradients, None, None, found_inf, flags, norm), torch.device("cpu", 0), keep=False
    )
    assert (found_inf.item(), flags.tolist(), norm.item()) == (0.0, [0, 0], 5.0)


def test_16_byte_accesses_need_source_and_target_aligned() -> None:
    from fxamp.kernels.launch import _Addresses, _prepare_anew

    storage, inv_scale = torch.zeros(64), torch.ones(())
    assert storage.data_ptr() % 16 == 0
    for source, target, access in [(0, 4, "WIDE"), (0, 5, "NARROW"), (1, 4, "NARROW"), (1, 5, "NARROW")]:
        pair = [storage[source:][:8]], [storage[32 + target :][:8]]
        work = UnscaleRequest(*pair, inv_scale)
        (launch,) = _prepare_anew(work, _Addresses.of(work)).launches
        assert launch.group.kernel.access.name == access
    for place in (0, 1):
        gradients = [storage[place:][:8]]
        for work in (UnscaleRequest(gradients, gradients, inv_scale), UnscaleRequest(gradients, found_inf=inv_scale)):
            (launch,) = _prepare_anew(work, _Addresses.of(work)).launches
            assert launch.group.kernel.access.name == ("PEELED" if place else "WIDE")


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often a table is built."""
    pytest.importorskip("triton")
    from fxamp.kernels import launch

    counts: Counter[str] = Counter()
    upload = launch._uploaded

    def counted(*arguments: object) -> object:
        counts["uploads"] += 1
        return upload(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "_uploaded", counted)
    monkeypatch.setattr(launch, "_launches", type(launch._launches)())
    return counts


def unscale(gradients: list[torch.Tensor]) -> None:
    with forced(Implementation.INTERPRETER):
        check_unscale_(gradients, torch.tensor(0.5), torch.zeros(()))


def test_a_table_is_kept_until_a_gradient_moves(uploads: Counter[str]) -> None:
    storage = torch.ones(64)
    for _ in range(3):
        unscale([storage[:8], storage[8:16]])
    assert uploads["uploads"] == 1
    unscale([storage[:8], storage[16:24]])
    assert uploads["uploads"] == 2
    assert storage[:24].tolist() == [1 / 16] * 8 + [1 / 8] * 8 + [1 / 2] * 8


def test_the_same_address_with_another_size_or_dtype_is_another_table(uploads: Counter[str]) -> None:
    storage = torch.ones(64)
    unscale([storage[:8]])
    unscale([storage[:9]])
    unscale([storage[:9].view(torch.float16)])
    unscale([storage[:16].view(4, 4)])
    unscale([storage[:16].view(4, 4)[:, :2]])
    assert uploads["uploads"] == 5
    assert storage[9:16].tolist() == [0.25, 0.5, 0.5, 0.25, 0.25, 0.5, 0.5]


def test_ops_keep_nothing(uploads: Counter[str]) -> None:
    from fxamp.kernels import launch

    gradients = [torch.ones(8)]
    with forced(Implementation.INTERPRETER):
        for _ in range(2):
            check_unscale(gradients, torch.tensor(0.5))
    assert uploads["uploads"] == 2
    assert not launch._launches


def test_few_tables_are_kept(uploads: Counter[str]) -> None:
    from fxamp.kernels import launch

    for numel in range(1, launch.MOST_LAUNCHES + 5):
        unscale([torch.ones(numel)])
    assert len(launch._launches) == launch.MOST_LAUNCHES


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("inv_scale", torch.ones((), dtype=torch.float64)),
        ("inv_scale", torch.ones(2)),
        ("found_inf", torch.zeros((), dtype=torch.int32)),
        ("flags", torch.zeros(2, dtype=torch.int64)),
        ("flags", torch.zeros(3, dtype=torch.int32)),
        ("flags", torch.zeros(4, dtype=torch.int32)[::2]),
        ("squared_norm", torch.zeros((), device="meta")),
    ],
)
def test_wrong_results_are_refused_with_what_was_expected(name: str, wrong: torch.Tensor) -> None:
    arguments = {"inv_scale": torch.ones(()), "found_inf": torch.zeros(())} | {name: wrong}
    gradients = [torch.ones(2), torch.ones(3)]
    with pytest.raises(OptionError, match=f"{name}: expected .* on cpu, got {wrong.numel()} of {wrong.dtype}"):
        check_unscale_(gradients, **arguments)
    assert gradients[0].tolist() == [1.0, 1.0]


def test_interpreting_leaves_triton_as_it_was() -> None:
    """Else kernels could not be compiled in this process any more."""
    tl = pytest.importorskip("triton").language
    parts = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    before = [attributes(part) for part in parts]
    with forced(Implementation.INTERPRETER):
        check_unscale_([torch.ones(8)], torch.ones(()), torch.zeros(()), squared_norm=torch.zeros(()))
    assert [attributes(part) for part in parts] == before


def attributes(part: object) -> dict[str, object]:
    """Return the attributes, inherited ones too: but for modules, which Triton imports when it first interprets."""
    values = {name: getattr(part, name) for name in dir(part) if name != "__annotations__"}
    return {name: value for name, value in values.items() if not isinstance(value, ModuleType)}


def test_reference_and_kernels_do_not_know_each_other() -> None:
    folder = Path(dispatch.__file__).parent
    for kernels in ("launch_plan", "gradient_triton", "store", "launch", "interpreter", "loss_scale_update_triton"):
        assert "reference" not in imports(folder / f"{kernels}.py")
    assert imports(folder / "reference.py") == {"gradient_request"}


def imports(path: Path) -> set[str]:
    """Return the modules of fxamp.kernels that a file imports."""
    return set(
        re.findall(r"fxamp\.kernels(?:\.| import )(\w+)", "\n".join(re.findall(r"^ *from .*", path.read_text(), re.M)))
    )


@pytest.mark.parametrize("chosen", [Implementation.INTERPRETER, Implementation.REFERENCE])
def test_what_runs_on_a_gpu_needs_no_op_for_bfloat16(chosen: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's has none on CUDA. Gradients with gaps are among these: the kernels leave them to the reference."""
    own = torch._amp_foreach_non_finite_check_and_unscale_

    def refusing(gradients: list[torch.Tensor], *others: torch.Tensor) -> None:
        if any(gradient.dtype is torch.bfloat16 for gradient in gradients):
            raise RuntimeError("not implemented for 'BFloat16'")
        own(gradients, *others)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refusing)
    for seed in range(4):
        with forced(chosen):
            require_in_place(random_gradients(seed, (torch.bfloat16, torch.float32)), inverse(SCALES[seed]))
