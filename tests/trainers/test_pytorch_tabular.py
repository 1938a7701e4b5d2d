"""PyTorch Tabular: GANDALF, whose masks are Functions of the library's own entmax, on Lightning's Trainer."""

from contextlib import chdir
from tempfile import TemporaryDirectory

import numpy as np
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import nn

tabular = library("pytorch_tabular")
configs = library("pytorch_tabular.config")
models = library("pytorch_tabular.models")
pandas = library("pandas")


def train(way: Way) -> nn.Module:
    generator = np.random.default_rng(0)
    rows = pandas.DataFrame(generator.normal(size=(64, 4)).astype(np.float32), columns=list("abcd"))
    rows["kind"], rows["target"] = generator.integers(3, size=64).astype(str), generator.integers(2, size=64)
    with TemporaryDirectory() as folder, chdir(folder):  # the library writes logs
        trainer = tabular.TabularModel(
            data_config=configs.DataConfig(target=["target"], continuous_cols=list("abcd"), categorical_cols=["kind"]),
            model_config=models.GANDALFConfig(task="classification", gflu_stages=2),
            optimizer_config=configs.OptimizerConfig(),
            trainer_config=configs.TrainerConfig(
                batch_size=16, max_epochs=2, accelerator="cpu", checkpoints=None, early_stopping=None, load_best=False,
                progress_bar="none", seed=0,
                trainer_kwargs={"precision": "bf16-mixed" if way.mixed else "32-true", "enable_model_summary": False},
            ),
            verbose=False, suppress_lightning_logger=True,
        )  # fmt: skip
        data = trainer.prepare_dataloader(train=rows, validation=rows[:16], seed=0)
        model = trainer.prepare_model(data)
        way.compile(model.backbone)
        trainer.train(model, data)
    return model


@each_variant()
def test_gated_features(variant: Variant) -> None:
    assert_trains_alike(train, variant)
