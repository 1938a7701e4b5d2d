"""A graph's text under a policy: the same decisions as the backend makes of the graph itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.programs.show_dumps import POLICY, Attention, Branches, Conv, Custom, Gpt, Mlp, dumped, rows

from fxamp.errors import ListingError, OptionError, PolicyError
from fxamp.graph_text import Listing
from fxamp.tools.inputs.load import Request, load, prepare

PROGRAMS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (Mlp, lambda: torch.randn(5, 8)),
    "conv": (Conv, lambda: torch.randn(2, 3, 8, 8)),
    "gpt": (Gpt, lambda: torch.randint(32, (2, 6))),
    "checkpoint": (lambda: Gpt(checkpointed=True), lambda: torch.randint(32, (2, 6))),
    "cond": (Branches, lambda: torch.randn(4, 4)),
    "custom-function": (Custom, lambda: torch.randn(4, 4)),
}


@pytest.mark.parametrize("name", exhaustive(PROGRAMS, always=[*PROGRAMS][:2]))
@pytest.mark.parametrize("dynamic", exhaustive([False, True], always=[True]))
def test_a_dump_gets_the_decisions_of_the_graph_itself(name: str, dynamic: bool, tmp_path: Path) -> None:
    model, example = PROGRAMS[name]
    for file, expected in dumped(model(), tmp_path, example(), dynamic=dynamic):
        document = load(str(file), Request(policy=POLICY))
        assert document.warnings == ()
        assert rows(document.graphs[0]) == rows(expected)
        assert sum(entry.is_cast for _, entry in expected.walk()) > 0


def test_sizes_keep_the_names_of_the_dump(tmp_path: Path) -> None:
    ((file, expected),) = dumped(Mlp(), tmp_path, torch.randn(5, 8), dynamic=True)
    listing = load(str(file), Request(policy=POLICY)).graphs[0]
    shapes = [value.shape for entry in listing.entries for value in entry.values]
    assert shapes == [value.shape for entry in expected.entries for value in entry.values]
    assert any(isinstance(size, str) for shape in shapes for size in shape)


def test_a_size_that_became_a_constant_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text(
        "class GraphModule(torch.nn.Module):\n"
        '    def forward(self, s7: "Sym(s7)", x: "f32[s7, 4]"):\n'
        '        ones: "f32[64, 4]" = torch.ones(64, 4)\n'
        '        z: "f32[s7, 4]" = torch.add(x, ones);  ones = None\n'
        "        return (z,)\n"
    )
    (warning,) = load(str(file), Request(policy=POLICY)).warnings
    assert warning.endswith("GraphModule needs numbers for symbolic sizes; assumed: s7 as 64")


def test_a_policy_for_an_absent_device_is_applied_to_a_cpu_dump(tmp_path: Path) -> None:
    ((file, _),) = dumped(Mlp(), tmp_path, torch.randn(5, 8), devices=True)
    listing = load(str(file), Request(policy="cuda-float16")).graphs[0]
    dtypes = {entry.target: entry.dtype for entry in listing.entries if entry.is_call}
    assert dtypes["aten::linear.default"] == "f16"
    assert dtypes["aten::layer_norm.default"] == "f32"
    assert {value.device for entry in listing.entries for value in entry.values} == {"cuda"}


def test_a_cuda_dump_keeps_its_devices(tmp_path: Path) -> None:
    ((file, _),) = dumped(Attention(), tmp_path, torch.randn(2, 4, 16), devices=True)
    file.write_text(file.read_text().replace("]cpu", "]cuda:0"))
    listing = load(str(file), Request(policy="cuda-bfloat16")).graphs[0]
    assert listing.entries[0].values[0].device == "cuda:0"
    with pytest.raises(PolicyError, match="policy 'cpu-bfloat16' is for device 'cpu', but the program runs on 'cuda'"):
        load(str(file), Request(policy="cpu-bfloat16"))


def test_several_policies_are_applied_to_one_graph(tmp_path: Path) -> None:
    from fxamp.tools.inputs.apply import choose

    ((file, expected),) = dumped(Mlp(), tmp_path, torch.randn(5, 8))
    (prepared,) = prepare(str(file), Request())
    policies = [choose(Request(policy=name), prepared.device) for name in ("cuda-float16", POLICY)]
    listings = [prepared.listing(policy, why) for policy, why in policies]
    assert [listing.policy for listing in listings] == ["cuda-float16", POLICY]
    assert rows(listings[1]) == rows(expected)


def test_a_device_alone_means_its_default(tmp_path: Path) -> None:
    ((file, _),) = dumped(Mlp(), tmp_path, torch.randn(5, 8))
    listing = load(str(file), Request(device="xpu:1")).graphs[0]
    assert (listing.policy, listing.device) == ("xpu-bfloat16", "xpu")
    assert "default on xpu" in listing.chosen


def test_a_policy_for_another_device_than_asked_for_is_refused(tmp_path: Path) -> None:
    ((file, _),) = dumped(Mlp(), tmp_path, torch.randn(5, 8))
    with pytest.raises(PolicyError, match="for device 'cuda', but the program runs on 'xpu'"):
        load(str(file), Request(policy="cuda-float16", device="xpu"))
    with pytest.raises(OptionError, match=r"--device 'cudaa:0' is unknown \(did you mean 'cuda'\?\); accepted: "):
        Request(device="cudaa:0")


GRAPH = """class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[4, 4]", y: "f32[4, 4]"):
        {line}
        mul: "f32[4, 4]" = z * y;  z = y = None
        return (mul,)
"""


def _shown(line: str, tmp_path: Path) -> tuple[Listing, tuple[str, ...]]:
    file = tmp_path / "graph.txt"
    file.write_text(GRAPH.format(line=line))
    document = load(str(file), Request(policy=POLICY))
    return document.graphs[0], document.warnings


def test_an_op_that_is_not_registered_has_the_results_in_the_text(tmp_path: Path) -> None:
    listing, warnings = _shown('z: "f32[4, 4]" = torch.ops.nowhere.op.default(x, 2)', tmp_path)
    (unknown,) = [entry for entry in listing.entries if entry.target == "nowhere::op.default"]
    assert "not known here" in unknown.verbatim
    assert unknown.call == "torch.ops.nowhere.op.default(x, 2)"
    assert unknown.values[0].shape == (4, 4)
    assert len(warnings) == 1
    assert "torch.ops.nowhere.op.default is not known here" in warnings[0]


def test_a_value_that_cannot_be_inferred_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ListingError, match="z cannot be run on its inputs, and the text gives no type"):
        _shown("z = torch.ops.nowhere.op.default(x)", tmp_path)


def test_an_input_without_a_type_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text(GRAPH.format(line="z = x + y").replace('x: "f32[4, 4]"', "x"))
    with pytest.raises(ListingError, match="input x has no type in the text"):
        load(str(file), Request(policy=POLICY))


ATTACKS = [
    'z: "f32[4, 4]" = __import__("os").system({touch!r})',
    'z: "f32[4, 4]" = eval("__import__(\'os\').system(" + repr({touch!r}) + ")")',
    'z: "f32[4, 4]" = torch.hub.os.system({touch!r})',
    'z: "f32[4, 4]" = torch.ops.aten.from_file.default({marker!r}, True, 16)',
    'z: "f32[4, 4]" = torch.from_file({marker!r}, True, 16)',
    'z: "f32[4, 4]" = torch.save(x, {marker!r})',
    'z: "f32[4, 4]" = torch.ops.aten.save.default(x, {marker!r})',
    'z: "f32[4, 4]" = x.numpy().tofile({marker!r})',
    'z: "f32[4, 4]" = x.__class__.__base__.__subclasses__()',
    'z: "f32[4, 4]" = operator.call(x, {touch!r})',
    'z: "f32[4, 4]" = torch.add(x, y if __import__("os").system({touch!r}) else y)',
    'z: "f32[4, 4]" = x + [__import__("os").system({touch!r}) for _ in (1,)][0]',
    'z: "f32[__import__(chr(111)+chr(115)).system(chr(49)), 4]" = torch.ops.nowhere.op(x)',
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_of_a_text_is_executed(attack: str, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    try:
        _shown(attack.format(touch=f"touch {marker}", marker=str(marker)), tmp_path)
    except ListingError as error:
        assert "\n" not in str(error)
    assert not marker.exists()


def test_defaults_and_annotations_are_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    call = f"__import__('os').system('touch {marker}')"
    text = GRAPH.format(line="z = x + y")
    for old, new in ((', y: "f32[4, 4]"', f', y: "f32[4, 4]" = {call}'), ('y: "f32[4, 4]"', f"y: {call}")):
        file = tmp_path / "graph.txt"
        file.write_text(text.replace(old, new))
        for request in (Request(), Request(policy=POLICY)):
            try:
                load(str(file), request)
            except ListingError as error:
                assert "\n" not in str(error)
    assert not marker.exists()


BACKWARD = """class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[4]", tangents_1: "f32[4]"):
        mul: "f32[4]" = torch.ops.aten.mul.Tensor(tangents_1, primals_1)
        return (mul,)
"""


def test_a_backward_gets_no_policy(tmp_path: Path) -> None:
    file = tmp_path / "backward.txt"
    file.write_text(BACKWARD)
    with pytest.raises(ListingError, match="it is a backward, whose dtypes follow from its forward"):
        load(str(file), Request(policy=POLICY))


def test_a_graph_after_decomposition_is_warned_about(tmp_path: Path) -> None:
    file = tmp_path / "forward.txt"
    file.write_text(BACKWARD.replace("tangents_1", "primals_2"))
    assert "AOTAutograd's level" in load(str(file), Request(policy=POLICY)).warnings[0]


def test_fxamps_own_dumps(tmp_path: Path) -> None:
    options = {"policy": POLICY, "lowering": "aot_eager", "dump": str(tmp_path)}
    torch.compile(Gpt(), backend="fxamp", options=options)(torch.randint(32, (2, 6))).backward()
    cast = load(str(tmp_path / "graph_0_cast.py"), Request()).graphs[0]
    again = load(str(tmp_path / "graph_0_captured.py"), Request(policy=POLICY)).graphs[0]
    assert rows(again) == rows(cast)
    with pytest.raises(ListingError, match=r"has the casts of policy 'cpu-bfloat16' already.*graph_0_captured\.py"):
        load(str(tmp_path / "graph_0_cast.py"), Request(policy=POLICY))
    for stage in ("forward", "backward"):
        with pytest.raises(ListingError, match=r"accepted: .*graph_0_captured\.py"):
            load(str(tmp_path / f"graph_0_{stage}.py"), Request(policy=POLICY))
