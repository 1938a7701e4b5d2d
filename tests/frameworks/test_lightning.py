"""fxamp.frameworks.lightning compared with Lightning's own mixed precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small import STEPS, assert_same, batches, net, weights
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxamp
from fxamp.tools.bench.host_syncs import HostReads

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from fxamp.frameworks.lightning import FxampPrecision
from fxamp.optim import CompiledOptimizer

LOWERING = {"lowering": "aot_eager"}
RUNS = [("bf16", False), ("16", False), ("16", True)]
SCALE = 2.0**10

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec:FutureWarning"),
]


class Logger(DummyLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(metrics)


class Module(LightningModule):
    """As Lightning's own examples are: the step logs, calls a submodule, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = net()
        self.losses: list[float] = []
        self.reads: list[int] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.net(*batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.net(*batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(outputs["loss"].item())

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        """Count what comes after the closure: under a mode nothing compiled runs."""
        reads = HostReads()

        def then_count() -> Any:
            result = closure()
            reads.__enter__()
            return result

        super().optimizer_step(epoch, index, optimizer, then_count)
        reads.__exit__(None, None, None)
        self.reads.append(reads.count)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def trainer(precision: MixedPrecision, folder: Path, **arguments: Any) -> Trainer:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "logger": Logger()}
    settings |= {"max_epochs": 1, "log_every_n_steps": 1, **arguments}
    return Trainer(
        accelerator="cpu",
        plugins=[precision],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        **settings,
    )


def fit(precision: MixedPrecision, folder: Path, loud: bool = False, **arguments: Any) -> tuple[Module, Trainer]:
    module, engine = Module(), trainer(precision, folder, **arguments)
    engine.fit(module, loader(batches(loud)), loader(batches()[:1]))
    assert not {"training_step", "validation_step", "log"} & set(vars(module))
    return module, engine


def loader(data: list[Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None)


def by_lightning(dtype: str) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if dtype == "16" else None
    return MixedPrecision(f"{dtype}-mixed", "cpu", scaler)


def by_fxamp(dtype: str, **scaler: Any) -> FxampPrecision:
    if dtype == "bf16":
        return FxampPrecision("cpu-bfloat16", options=LOWERING)
    return FxampPrecision("cpu-float16", {"init_scale": SCALE, **scaler}, LOWERING)


@pytest.mark.parametrize("run", exhaustive(RUNS, always=[("bf16", False), ("16", True)]))
def test_training_is_that_of_lightnings_own_mixed_precision(run: tuple[str, bool], tmp_path: Path) -> None:
    dtype, loud = run
    ours, our_trainer = fit(by_fxamp(dtype), tmp_path, loud)
    theirs, their_trainer = fit(by_lightning(dtype), tmp_path, loud)

    assert repr(ours.losses) == repr(theirs.losses) and len(ours.losses) == STEPS
    assert our_trainer.callback_metrics["val_loss"] == their_trainer.callback_metrics["val_loss"]
    assert_same(weights(ours), weights(theirs))
    assert fxamp.report(ours).casts > 0
    if dtype == "16":
        shown = [row for row in our_trainer.logger.rows if "loss_scale" in row]
        assert len(shown) == STEPS // 2
        assert shown[-1] == {
            "loss_scale": their_trainer.precision_plugin.scaler.get_scale(),
            "skipped_steps": float(loud),
        }


@pytest.mark.exhaustive
def test_the_device_skips(tmp_path: Path) -> None:
    host, _ = fit(by_fxamp("16"), tmp_path, loud=True)
    precision = by_fxamp("16", skip="device", step_lowering="aot_eager")

    device, _ = fit(precision, tmp_path, loud=True, log_every_n_steps=STEPS)

    assert device.reads[0] > 0 == sum(device.reads[1:]) and len(device.reads) == STEPS // 2
    assert precision.scaler.skipped_steps == 1
    torch.testing.assert_close(weights(device), weights(host), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [by_lightning, by_fxamp])
def test_a_compiled_optimizer_steps_inside_of_lightnings(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's wrapper gives the step a closure, which computes the gradients."""
    eager, _ = fit(way("bf16"), tmp_path)
    real = Module.configure_optimizers
    compiled: list[torch.optim.Optimizer] = []

    def optimizer_of(self: Module) -> torch.optim.Optimizer:
        compiled.append(fxamp.compile_optimizer(real(self), lowering="aot_eager"))
        return compiled[0]

    monkeypatch.setattr(Module, "configure_optimizers", optimizer_of)
    ours, _ = fit(way("bf16"), tmp_path)

    assert CompiledOptimizer.of(compiled[0]).compilations == 1
    assert not CompiledOptimizer.of(compiled[0]).reasons
    torch.testing.assert_close(weights(ours), weights(eager), rtol=1e-5, atol=1e-6)


def test_training_resumes_with_its_scale(tmp_path: Path) -> None:
    whole, first = fit(by_fxamp("16"), tmp_path, loud=True, max_epochs=1)
    first.save_checkpoint(tmp_path / "saved.ckpt")
    state = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert list(state["state_dict"]) == list(Module().state_dict())
    trainer(first.precision_plugin, tmp_path, max_epochs=2).fit(
        whole, loader(batches(loud=True)), ckpt_path=tmp_path / "saved.ckpt"
    )

    again, precision = Module(), by_fxamp("16", growth_interval=7)
    trainer(precision, tmp_path, max_epochs=2).fit(again, loader(batches(loud=True)), ckpt_path=tmp_path / "saved.ckpt")

    assert_same(weights(again), weights(whole))
    assert precision.state_dict() == first.precision_plugin.state_dict()


def test_a_module_without_a_graph_that_runs_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch._dynamo.config.patch(disable=True):
        fit(by_fxamp("bf16"), tmp_path)

    assert "Module is compiled with fxamp, but none of its graphs" in caplog.text


def test_a_module_that_another_compiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fxamp.FxampError, match="Module is compiled already"):
        trainer(by_fxamp("bf16"), tmp_path).fit(torch.compile(Module(), backend="eager"), loader(batches()))
