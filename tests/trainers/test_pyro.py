"""Pyro: ``SVI.step`` on a variational autoencoder, whose optimizers are one for each parameter."""

import torch
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import Tensor, nn

pyro = library("pyro")
distributions = library("pyro.distributions")
infer = library("pyro.infer")
optim = library("pyro.optim")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.scale = nn.Linear(16, 12), nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = nn.functional.softplus(self.body(x))
        return self.mean(hidden), self.scale(hidden).exp()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 12), nn.Linear(12, 16)

    def forward(self, z: Tensor) -> Tensor:
        return self.head(nn.functional.softplus(self.body(z))).sigmoid()


def train(way: Way) -> nn.Module:
    pyro.clear_param_store()
    encoder, decoder = Encoder(), Decoder()
    for network in (encoder, decoder):
        way.cast_forward(network)
        way.compile(network)

    def model(x: Tensor) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", distributions.Normal(torch.zeros(len(x), 3), 1.0).to_event(1))
            pyro.sample("x", distributions.Bernoulli(decoder(z)).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("rows", len(x)):
            pyro.sample("z", distributions.Normal(*encoder(x)).to_event(1))

    inference = infer.SVI(model, guide, optim.Adam({"lr": 1e-2}), infer.RenyiELBO(num_particles=2))
    for x in torch.rand(6, 8, 16).round():
        inference.step(x)
    return nn.ModuleList([encoder, decoder])


@each_variant()
def test_variational_inference(variant: Variant) -> None:
    assert_trains_alike(train, variant)
