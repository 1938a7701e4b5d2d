"""What fxamp.rewrite returns holds its source's parameters and buffers, under the source's names."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.checks.equality import assert_equal
from torch import Tensor, nn

import fxamp


class Tied(nn.Module):
    """Two names for one weight, a buffer that is not saved, a tensor that is no buffer, a part that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.body[0].weight
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.offset = torch.ones(4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.mask + self.offset


X = torch.linspace(-1, 1, 12).reshape(3, 4)

SOURCES: dict[str, Callable[[nn.Module], object]] = {
    "module": lambda model: model,
    "exported": lambda model: torch.export.export(model, (X,)),
    "symbolic trace": torch.fx.symbolic_trace,
}


def named(module: nn.Module) -> dict[str, list[tuple[str, int]]]:
    return {
        "parameters": [(name, id(value)) for name, value in module.named_parameters(remove_duplicate=False)],
        "saved": [(name, value.data_ptr()) for name, value in module.state_dict().items()],
    }


@pytest.mark.parametrize("kind", SOURCES)
def test_names_and_tensors_are_the_sources(kind: str) -> None:
    model = Tied()
    source = SOURCES[kind](model)
    rewritten = fxamp.rewrite(source, (X,), policy="cpu-bfloat16")
    expected = source if isinstance(source, nn.Module) else model
    assert named(rewritten) == named(expected)
    assert dict(expected.named_buffers()).items() <= dict(rewritten.named_buffers()).items()


@pytest.mark.parametrize("kind", SOURCES)
def test_training_the_rewritten_module_trains_the_source(kind: str) -> None:
    model, twin = Tied(), Tied()
    twin.load_state_dict(model.state_dict())
    rewritten = fxamp.rewrite(SOURCES[kind](model), (X,), policy="cpu-bfloat16")
    optimizer = torch.optim.SGD(rewritten.parameters(), 0.1)
    expected = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            twin(X).float().square().sum().backward()
        rewritten(X).float().square().sum().backward()
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    assert_equal(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("kind", SOURCES)
def test_other_values_by_the_same_names(kind: str) -> None:
    """load_state_dict and torch.func.functional_call reach every tensor that the graph reads."""
    model = Tied().eval()
    rewritten = fxamp.rewrite(SOURCES[kind](model), (X,), policy="cpu-bfloat16")
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    once = {name: zeros[name] for name, _ in rewritten.named_parameters()}
    result = torch.func.functional_call(rewritten, once, (X,))
    assert torch.equal(result.float(), torch.ones(3, 4))
    rewritten.load_state_dict(zeros, strict=kind != "symbolic trace")
    assert torch.equal(model(X), torch.ones(3, 4))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
@pytest.mark.parametrize("kind", ["exported", "symbolic trace"])
def test_a_rewritten_graph_is_exported_and_copied_with_plain_names(kind: str) -> None:
    model = Tied().eval()
    rewritten = fxamp.rewrite(SOURCES[kind](model), (X,), policy="cpu-bfloat16")
    exported = torch.export.export(rewritten, (X,))
    assert set(model.state_dict()) <= set(exported.state_dict) | {"head.weight", "unused.weight", "unused.bias"}
    assert torch.equal(exported.module()(X), rewritten(X))
    twin = copy.deepcopy(rewritten)
    assert torch.equal(twin(X), rewritten(X))
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(twin(X), rewritten(X))


def test_a_parameter_among_the_arguments_stays_an_argument() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, factor: Tensor) -> Tensor:
            return x * self.scale.exp() @ factor

    model, factor = Scales(), nn.Parameter(torch.ones(4))
    rewritten = fxamp.rewrite(model, (X, factor), policy="cpu-bfloat16")
    assert list(rewritten.state_dict()) == ["scale"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rewritten(X, 2 * factor), model(X, 2 * factor))


def test_a_function_has_no_state() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    rewritten = fxamp.rewrite(lambda x: x @ weight, (X,), policy="cpu-bfloat16")
    assert list(rewritten.state_dict()) == []
    rewritten(X).float().sum().backward()
    assert weight.grad is not None


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def nested_product(pair: dict[str, list[Tensor]]) -> Tensor:
    return pair["both"][0] @ pair["both"][1].t()


@pytest.mark.parametrize("gradients", [False, True])
def test_one_tensor_for_two_arguments_stays_two_arguments(gradients: bool) -> None:
    x, y = (torch.randn(3, 4, requires_grad=gradients) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        expected = product(x, y)
    plain = fxamp.rewrite(product, (x, x), policy="cpu-bfloat16")
    nested = fxamp.rewrite(nested_product, ({"both": [x, x]},), policy="cpu-bfloat16")
    for result in (plain(x, y), nested({"both": [x, y]})):
        assert torch.equal(result, expected) and result.requires_grad is gradients


def test_a_parameter_of_the_module_as_an_argument_stays_one() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return x @ self.weight + x @ weight

    model = Product()
    rewritten = fxamp.rewrite(model, (X, model.weight), policy="cpu-bfloat16")
    for weight in (torch.randn(4, 4), model.weight):
        got = torch.autograd.grad(rewritten(X, weight).float().square().sum(), model.weight)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(X, weight)
        assert torch.equal(rewritten(X, weight), expected)
        assert torch.equal(*got, *torch.autograd.grad(expected.float().square().sum(), model.weight))


@pytest.mark.parametrize("kind", SOURCES)
def test_a_copy_has_tensors_of_its_own(kind: str) -> None:
    model = Tied()
    rewritten = fxamp.rewrite(SOURCES[kind](model), (X,), policy="cpu-bfloat16")
    twin = copy.deepcopy(rewritten)
    result = twin(X)
    assert torch.equal(result, rewritten(X)) and twin.code == rewritten.code
    result.float().square().sum().backward()
    used = {name: value for name, value in twin.named_parameters() if not name.startswith("unused")}
    assert used and all(value.grad is not None for value in used.values())
    assert all(value.grad is None for value in rewritten.parameters())
    rewritten(X).float().square().sum().backward()
    own = dict(rewritten.named_parameters())
    assert all(torch.equal(value.grad, own[name].grad) for name, value in used.items())


def test_a_copy_of_a_rewritten_function_computes_the_same() -> None:
    rewritten = fxamp.rewrite(lambda x, scale: {"scaled": [x @ x.t() * scale]}, (X, 2.0), policy="cpu-bfloat16")
    assert torch.equal(copy.deepcopy(rewritten)(X, 2.0)["scaled"][0], rewritten(X, 2.0)["scaled"][0])
