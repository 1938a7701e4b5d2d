"""fxamp.frameworks.transformers compared with the Trainer's own mixed precision."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small import WIDTH, assert_same, net, weights
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn

import fxamp
from fxamp.tools.bench.host_syncs import HostReads

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402
from test_accelerate import reset  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from fxamp.errors import DroppedResultError, OptionError  # noqa: E402
from fxamp.frameworks.transformers import FxampCallback  # noqa: E402

LOWERING = {"lowering": "aot_eager"}
SCALE = 2.0**10
STEPS = 4


@pytest.fixture(autouse=True)
def as_the_first_trainer() -> None:
    reset()


class Classifier(nn.Module):
    """As models of transformers call it and return."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x, labels)}


def data(number: int, loud: bool = False) -> list[dict[str, Tensor]]:
    """``loud``: one of them, of the second step, holds values that float16 does not."""
    generator = torch.Generator().manual_seed(number)
    examples = [
        {"x": torch.randn(WIDTH, generator=generator), "labels": torch.randint(4, (), generator=generator)}
        for _ in range(number)
    ]
    if loud:
        examples[2]["x"].mul_(1e6)
    return examples


class Own(TrainerCallback):
    """The float16 that the Trainer has on GPUs alone."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        more["model"].forward = torch.autocast("cpu", torch.float16)(more["model"].forward)


def trainer(folder: Path, *callbacks: TrainerCallback, loud: bool = False, **arguments: Any) -> Any:
    reset()
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **arguments}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        learning_rate=0.1,
        optim="adamw_torch",  # of the fused one Accelerate does not see that it skips
        max_grad_norm=0.5,
        per_device_eval_batch_size=2,
        save_steps=2,
        disable_tqdm=True,
        **settings,
    )
    train = data(16, loud)
    return Trainer(Classifier(), args, train_dataset=train, eval_dataset=data(2), callbacks=list(callbacks))


def by_fxamp(folder: Path, policy: str, *callbacks: TrainerCallback, scaler: Any = None, **arguments: Any) -> Any:
    settings = {"init_scale": SCALE, **(scaler or {})} if policy == "cpu-float16" else None
    return trainer(folder, FxampCallback(policy, settings, LOWERING), *callbacks, **arguments)


def in_float16(folder: Path, loud: bool) -> Any:
    """By torch alone: what Accelerate does on a GPU, whose scaler it does not make on a CPU."""
    engine = trainer(folder, Own(), loud=loud)
    engine.accelerator.native_amp, engine.accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=SCALE)
    engine.accelerator.state._mixed_precision = "fp16"
    return engine


def history(engine: Any, *names: str) -> list[list[Any]]:
    return [[entry.get(name) for name in names] for entry in engine.state.log_history if "loss" in entry]


def report_text(engine: Any) -> str:
    """What was logged, as text: a norm may be nan."""
    return repr(history(engine, "loss", "grad_norm", "learning_rate"))


def scaler_of(engine: Any) -> fxamp.GradScaler:
    (callback,) = (one for one in engine.callback_handler.callbacks if isinstance(one, FxampCallback))
    return callback.scaler


@pytest.mark.exhaustive
def test_bfloat16_is_the_trainers_own(tmp_path: Path) -> None:
    theirs, ours = trainer(tmp_path / "theirs", bf16=True), by_fxamp(tmp_path / "ours", "cpu-bfloat16")
    theirs.train(), ours.train()

    assert report_text(ours) == report_text(theirs)
    assert ours.evaluate()["eval_loss"] == theirs.evaluate()["eval_loss"]
    assert_same(weights(ours.model), weights(theirs.model))
    assert len(fxamp.report(ours.model).graphs) > 0


def test_auto_follows_the_trainers_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a region inside of the graph."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # the Trainer sets it for the process
    theirs, ours = trainer(tmp_path / "theirs", bf16=True), by_fxamp(tmp_path / "ours", "auto", bf16=True)
    theirs.train(), ours.train()

    assert report_text(ours) == report_text(theirs)
    assert ours.evaluate()["eval_loss"] == theirs.evaluate()["eval_loss"]
    assert_same(weights(ours.model), weights(theirs.model))
    assert {graph.policy for graph in fxamp.report(ours.model).graphs} == {"cpu-bfloat16"}


@pytest.mark.parametrize("loud", exhaustive([False, True], always=[True]))
def test_float16_is_torchs_own(tmp_path: Path, loud: bool) -> None:
    theirs = in_float16(tmp_path / "theirs", loud)
    theirs.train()
    ours = by_fxamp(tmp_path / "ours", "cpu-float16", loud=loud)
    ours.train()

    assert report_text(ours) == report_text(theirs)
    assert_same(weights(ours.model), weights(theirs.model))
    assert history(ours, "loss_scale")[-1] == [theirs.accelerator.scaler.get_scale()]
    assert history(ours, "skipped_steps")[-1] == [int(loud)]
    assert history(ours, "loss_scale")[0] == [SCALE]


class Counting(TrainerCallback):
    """Counts what the host reads while the optimizer steps."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.mode = HostReads().__enter__()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.counts.append(self.mode.count)


@pytest.mark.exhaustive
def test_the_device_skips_and_the_schedule_follows(tmp_path: Path) -> None:
    counting, skip = Counting(), {"skip": "device", "step_lowering": "aot_eager"}

    host = by_fxamp(tmp_path / "host", "cpu-float16", loud=True)
    device = by_fxamp(tmp_path / "device", "cpu-float16", counting, scaler=skip, loud=True)
    host.train(), device.train()

    assert counting.counts[0] > 0 == sum(counting.counts[1:]) and len(counting.counts) == STEPS
    assert scaler_of(device).skipped_steps == scaler_of(host).skipped_steps == 1
    assert device.lr_scheduler.get_last_lr() == host.lr_scheduler.get_last_lr()
    torch.testing.assert_close(weights(device.model), weights(host.model), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("restore", [False, True])
def test_training_resumes_with_its_scale(tmp_path: Path, restore: bool) -> None:
    arguments = {"loud": True, "restore_callback_states_from_checkpoint": restore}
    whole = by_fxamp(tmp_path, "cpu-float16", **arguments)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"

    again = by_fxamp(tmp_path, "cpu-float16", scaler={"growth_interval": 7}, **arguments)
    again.train(resume_from_checkpoint=str(checkpoint))

    assert_same(weights(again.model), weights(whole.model))
    assert scaler_of(again).state_dict() == scaler_of(whole).state_dict()
    saved = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["FxampCallback"]
    assert saved["attributes"]["restored"]["scale"] == SCALE / 2
    assert list(load_file(checkpoint / "model.safetensors")) == sorted(Classifier().state_dict())


def written(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> tuple[Any, list[Any], list[int]]:
    """A tiny GPT-2, trained by a trainer that generates text as it evaluates: its texts, the graphs until each."""
    reset()
    torch._dynamo.reset()
    torch.manual_seed(0)
    words = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=40,
            n_positions=32,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            **words,
        )
    )
    texts: list[Any] = []
    graphs: list[int] = []

    def metrics(prediction: Any) -> dict[str, float]:
        texts.append(prediction.predictions.tolist())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return {}

    rows = torch.randint(3, 40, (8, 5), generator=torch.Generator().manual_seed(1))
    train = [{"input_ids": row, "labels": row} for row in rows]
    args = transformers.Seq2SeqTrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        learning_rate=0.05,
        optim="adamw_torch",
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        save_strategy="no",
        disable_tqdm=True,
        predict_with_generate=True,
        generation_config=transformers.GenerationConfig(max_new_tokens=8, min_new_tokens=8, **words),
        **arguments,
    )
    engine = transformers.Seq2SeqTrainer(
        model, args, train_dataset=train, eval_dataset=train[:2], compute_metrics=metrics, callbacks=list(callbacks)
    )
    engine.train()
    prompt = rows[2:3, :3]
    texts.append(
        model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=args.generation_config)
    )
    return engine, texts, graphs


@pytest.mark.exhaustive
def test_text_is_generated_between_steps_as_by_the_trainer_alone(tmp_path: Path) -> None:
    theirs, their_texts, _ = written(tmp_path / "theirs", bf16=True)
    ours, our_texts, graphs = written(tmp_path / "ours", FxampCallback("cpu-bfloat16", options=LOWERING))

    assert len(our_texts) == 3 and repr(our_texts) == repr(their_texts)
    assert report_text(ours) == report_text(theirs)
    losses = [[entry.get("eval_loss") for entry in engine.state.log_history] for engine in (ours, theirs)]
    assert losses[0] == losses[1]
    assert_same(weights(ours.model), weights(theirs.model))
    assert 0 < graphs[0] == graphs[1], "the second evaluation compiles nothing, though each word is another length"


def test_another_scaler_is_refused(tmp_path: Path) -> None:
    engine = by_fxamp(tmp_path, "cpu-float16", fp16=True)
    with pytest.raises(fxamp.FxampError, match="brings a scaler of its own"):
        engine.train()


def test_a_callback_that_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    saved = FxampCallback(fxamp.Policy.load("cpu-bfloat16")).state()
    json.dumps(saved)
    with pytest.raises(fxamp.FxampError, match="objects that a checkpoint cannot hold"):
        FxampCallback(**saved["args"])


class Logits(Classifier):
    """Returns its logits too."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x, labels), "logits": self.net.body(x) * 2}


def test_training_drops_what_evaluation_reads(tmp_path: Path) -> None:
    shapes: list[Any] = []

    class Watching(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, **more)
            if torch.is_grad_enabled():
                shapes.append(outputs["logits"].shape)
                with pytest.raises(DroppedResultError, match=r"FxampCallback\(drop_logits=True\)"):
                    outputs["logits"].sum()
            return (loss, outputs) if return_outputs else loss

    callback = FxampCallback("cpu-bfloat16", None, LOWERING, drop_logits=True)
    engine = trainer(tmp_path, callback)
    ours = Watching(Logits(), engine.args, train_dataset=data(16), eval_dataset=data(2), callbacks=[callback])
    ours.train()
    assert len(shapes) == 2 * STEPS
    assert ours.predict(data(2)).predictions.shape[0] == 2
    assert callback.state()["args"]["drop_logits"]
    with pytest.raises(OptionError, match="drop_logits=True needs a named policy"):
        FxampCallback(drop_logits=True)
