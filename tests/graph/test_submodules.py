"""What fxamp reads of a module's structure equals what nn.Module says, and calls no code of the module's class."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.graph.submodules import all_paths, first_names, named_buffers, named_parameters, submodules


class Narrow(nn.Module):
    """Names its parameters as TorchRL's losses do: without some of them, and without ``remove_duplicate``."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.tied = self.online

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        for name, value in super().named_parameters(prefix=prefix, recurse=recurse):
            if not name.startswith("target"):
                yield name, value

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (value for _, value in self.named_parameters(recurse=recurse))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.tied(x) - self.target(x))


class Remade(nn.Module):
    """Makes its weight anew whenever its parts are listed, as peft's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.listed = nn.Parameter(torch.ones(4, 4)), 0

    def named_modules(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Module]]:
        self.listed += 1
        self.weight = nn.Parameter(self.weight.data)
        return super().named_modules(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def nested() -> nn.Module:
    inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    return nn.ModuleDict({"a": inner, "b": nn.ModuleList([inner, inner[0], nn.BatchNorm1d(2, affine=False)])})


@pytest.mark.parametrize("root", [nested(), nn.Linear(2, 2), nn.Module(), nn.TransformerEncoderLayer(4, 2, 8)], ids=str)
def test_the_structure_is_that_of_nn_module(root: nn.Module) -> None:
    assert list(submodules(root)) == list(root.named_modules())
    assert list(all_paths(root)) == list(root.named_modules(remove_duplicate=False))
    for ours, named in ((named_parameters, root.named_parameters), (named_buffers, root.named_buffers)):
        assert [(name, id(value)) for name, value in ours(root)] == [
            (name, id(value)) for name, value in named(remove_duplicate=False)
        ]
        assert {name: id(value) for name, value in first_names(ours(root)).items()} == {
            name: id(value) for name, value in named()
        }


def test_a_module_inside_of_itself_ends() -> None:
    root = nn.Module()
    root.part = nn.Linear(2, 2)
    root.part.whole = root
    assert [path for path, _ in all_paths(root)] == ["", "part"]


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_a_class_that_names_fewer_parameters_is_compiled_and_reported(lowering: str) -> None:
    model = Narrow()
    model.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    model(torch.randn(3, 4)).sum().backward()

    report = fxamp.report(model)
    assert report.casts > 0 and report.outside == ()
    assert all(value.grad is not None for value in [*model.parameters(), *model.target.parameters()])


def test_a_class_that_names_fewer_parameters_is_rewritten_with_all_its_state() -> None:
    model, x = Narrow().eval(), torch.randn(3, 4)
    rewritten = fxamp.rewrite(model, (x,), policy="cpu-bfloat16")
    assert rewritten.state_dict().keys() == model.state_dict().keys()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rewritten(x), model(x))


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_a_class_that_changes_when_it_is_listed_is_listed_by_dynamo_alone(lowering: str) -> None:
    ours = {"backend": "fxamp", "options": {"policy": "cpu-bfloat16", "lowering": lowering}}
    listed = []
    for settings in ({"backend": lowering}, ours):
        torch._dynamo.reset()
        model = Remade()
        model.compile(**settings)
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
        weight, outside = model.weight, fxamp.report(model).outside
        assert model.weight is weight and weight.grad is not None
        assert outside == (() if settings is ours else ("weight",))
        listed.append(model.listed)

    assert listed[0] == listed[1]
