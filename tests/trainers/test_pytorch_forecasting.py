"""PyTorch Forecasting: N-BEATS, whose blocks share weights, on Lightning's Trainer, whose autocast has no cache."""

import numpy as np
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import nn

forecasting = library("pytorch_forecasting")
pandas = library("pandas")
lightning = library("lightning.pytorch")


def train(way: Way) -> nn.Module:
    rows = pandas.DataFrame({"at": np.arange(40), "value": np.sin(np.arange(40) / 3), "series": "a"})
    data = forecasting.TimeSeriesDataSet(
        rows, time_idx="at", target="value", group_ids=["series"], time_varying_unknown_reals=["value"],
        max_encoder_length=8, min_encoder_length=8, max_prediction_length=2, min_prediction_length=2,
    )  # fmt: skip
    model = forecasting.NBeats.from_dataset(data, widths=[8, 16], num_blocks=[1, 1], learning_rate=1e-2)
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed" if way.mixed else "32-true", max_epochs=1, limit_train_batches=4,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(way.compile(model), data.to_dataloader(train=True, batch_size=4, num_workers=0))
    return model


@each_variant()
def test_nbeats(variant: Variant) -> None:
    assert_trains_alike(train, variant)
