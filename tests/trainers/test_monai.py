"""MONAI: its supervised trainer of a U-Net with residual units, on volumes."""

import torch
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import nn

engines = library("monai.engines")
networks = library("monai.networks.nets")
losses = library("monai.losses")


def train(way: Way) -> nn.Module:
    network = networks.UNet(3, 1, 2, channels=(4, 8), strides=(2,), num_res_units=1)
    way.cast_forward(network)
    batches = [{"image": torch.randn(2, 1, 8, 8, 8), "label": torch.randint(2, (2, 1, 8, 8, 8))} for _ in range(4)]
    engines.SupervisedTrainer(
        device=torch.device("cpu"), max_epochs=1, train_data_loader=batches, network=way.compile(network),
        optimizer=torch.optim.Adam(network.parameters(), 1e-2),
        loss_function=losses.DiceLoss(to_onehot_y=True, softmax=True),
    ).run()  # fmt: skip
    return network


@each_variant()
def test_the_supervised_trainer(variant: Variant) -> None:
    assert_trains_alike(train, variant)
