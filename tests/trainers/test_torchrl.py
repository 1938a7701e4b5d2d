"""TorchRL: its losses, which hold their networks' parameters apart from the networks, and name only some of them."""

import torch
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import nn

modules = library("torchrl.modules")
objectives = library("torchrl.objectives")
tensordict = library("tensordict")

#: Why numbers differ from eager autocast's.
AS_TORCH = 'torch.compile differs from eager autocast in the same way, under its backend "eager" too'


def batch() -> object:
    ended = torch.zeros(16, 1, dtype=torch.bool)
    following = {"observation": torch.randn(16, 4), "reward": torch.randn(16, 1), "done": ended, "terminated": ended}
    data = {"observation": torch.randn(16, 4), "action": torch.rand(16, 2) - 0.5, "next": following}
    return tensordict.TensorDict(data, [16])


def actor() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4), tensordict.nn.NormalParamExtractor())
    return modules.ProbabilisticActor(
        tensordict.nn.TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"], distribution_class=modules.TanhNormal, return_log_prob=True,
    )  # fmt: skip


def train(way: Way) -> nn.Module:
    critic = modules.ValueOperator(modules.MLP(6, 1, num_cells=[16]), in_keys=["observation", "action"])
    loss = objectives.SACLoss(actor(), critic, action_spec=None, target_entropy=-2.0)
    loss.make_value_estimator(gamma=0.9)
    way.compile(loss)
    targets = objectives.SoftUpdate(loss, eps=0.9)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-2)
    for _ in range(4):
        with way.autocast():
            terms = loss(batch())
        sum(value for name, value in terms.items() if name.startswith("loss")).backward()
        optimizer.step()
        optimizer.zero_grad()
        targets.step()
    return loss


@each_variant()
def test_soft_actor_critic(variant: Variant) -> None:
    assert_trains_alike(train, variant, inexact=AS_TORCH if variant.lowering == "eager" else "")
