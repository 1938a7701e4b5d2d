"""GluonTS: its feed-forward estimator, which makes Lightning's Trainer itself."""

from tempfile import TemporaryDirectory

import numpy as np
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import nn

library("gluonts.torch")
estimators = library("gluonts.torch.model.simple_feedforward")
datasets = library("gluonts.dataset.common")


def train(way: Way) -> nn.Module:
    precision = "bf16-mixed" if way.mixed else "32-true"
    made: list[nn.Module] = []

    class Estimator(estimators.SimpleFeedForwardEstimator):
        def create_lightning_module(self) -> nn.Module:
            module = super().create_lightning_module()
            made.append(module)
            way.compile(module.model)
            return module

    series = [{"start": "2020-01-01", "target": np.sin(np.arange(40) / 3 + shift)} for shift in range(4)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    with TemporaryDirectory() as folder:  # GluonTS writes a checkpoint
        Estimator(
            2,
            context_length=8,
            hidden_dimensions=[16],
            batch_size=4,
            num_batches_per_epoch=4,
            trainer_kwargs={"max_epochs": 1, "precision": precision, "default_root_dir": folder, **quiet},
        ).train(datasets.ListDataset(series, freq="D"))
    return made[0]


@each_variant()
def test_a_feed_forward_estimator(variant: Variant) -> None:
    assert_trains_alike(train, variant)
