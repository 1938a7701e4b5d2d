"""PyTorch Metric Learning: its trainer of an embedding on top of a trunk, with a miner and a triplet loss."""

import torch
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from support.programs.small_models import Perceptron
from torch import nn
from torch.utils.data import TensorDataset

trainers, losses, miners = (library(f"pytorch_metric_learning.{name}") for name in ("trainers", "losses", "miners"))


def train(way: Way) -> nn.Module:
    models = {"trunk": Perceptron(10, 24, 16), "embedder": Perceptron(16, 24, 8)}
    for model in models.values():
        way.compile(model)
    optimizers = {f"{name}_optimizer": torch.optim.Adam(model.parameters(), 1e-2) for name, model in models.items()}
    trainer = trainers.MetricLossOnly(
        models=models,
        optimizers=optimizers,
        batch_size=12,
        loss_funcs={"metric_loss": losses.TripletMarginLoss()},
        mining_funcs={"tuple_miner": miners.MultiSimilarityMiner()},
        dataset=TensorDataset(torch.randn(48, 10), torch.randint(4, (48,))),
        data_device=torch.device("cpu"),
        dtype=torch.float32,
        dataloader_num_workers=0,
    )
    with way.autocast():
        trainer.train(num_epochs=2)
    return nn.ModuleDict(models)


@each_variant()
def test_metric_loss_only(variant: Variant) -> None:
    assert_trains_alike(train, variant)
