"""Stable-Baselines3: ``PPO.learn``, whose policy acts without gradients and learns with them."""

import numpy as np
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import nn

baselines = library("stable_baselines3")
gymnasium = library("gymnasium")


class Walk(gymnasium.Env):
    """One step to the left or to the right is better."""

    observation_space = gymnasium.spaces.Box(-3, 3, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.generator, self.steps = np.random.default_rng(0), 0
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        self.seen = self.generator.normal(size=4).astype(np.float32)
        return self.seen

    def step(self, action):
        reward, self.steps = float((self.seen[0] > 0) == bool(action)), self.steps + 1
        return self.observe(), reward, self.steps >= 8, False, {}


def train(way: Way) -> nn.Module:
    ppo = baselines.PPO(
        "MlpPolicy", Walk(), n_steps=16, batch_size=8, n_epochs=2, seed=0, device="cpu",
        policy_kwargs={"net_arch": [16]},
    )  # fmt: skip
    network = ppo.policy.mlp_extractor
    way.cast_forward(network)
    way.compile(network)
    ppo.learn(32)
    return ppo.policy


@each_variant()
def test_proximal_policies(variant: Variant) -> None:
    assert_trains_alike(train, variant)
