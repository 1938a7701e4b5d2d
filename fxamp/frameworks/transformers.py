"""Hugging Face Trainer: a callback that compiles the model, and steps the optimizer through a scaler in float16."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from fxamp.errors import OptionError
from fxamp.frameworks.accelerate import make_scale, take_over
from fxamp.frameworks.setup import ScalerLike, setup, warn_untested
from fxamp.policy import Origin, Policy, Rule

warn_untested("transformers")

#: The placeholder for a value that JSON cannot hold.
_LOST = "an object of the process that saved it"


#: The rule that ``drop_logits=True`` adds: it drops every floating-point tensor except the loss.
DROP_LOGITS = Rule(
    "drop-logits",
    drop=True,
    args={"result": {"dtype": ["float32", "bfloat16", "float16"], "rank": ">=1"}},
    origin=Origin("FxampCallback(drop_logits=True)"),
    why="The Trainer reads the loss alone in training.",
)


class FxampCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """``Trainer(..., callbacks=[FxampCallback(policy="cuda-float16")])``: nothing else changes.

    The model is compiled in place when the Trainer is created. Training, evaluation and generation use it; names in
    checkpoints do not change. In float16 the optimizer steps through ``scaler``, gradients are unscaled after the
    backward, logs contain ``loss_scale`` and ``skipped_steps``, and checkpoints contain the scaler's state.

    Args:
        policy: "auto", a built-in name, a path, or a Policy.
        scaler: a GradScaler; a dict of its arguments (``{"skip": "device"}``); None: the policy decides.
        options: further options of the backend.
        drop_logits: training computes only the loss, not the logits, the largest other result of a language model. Code
            that reads them raises DroppedResultError. Evaluation computes them. Needs a policy other than "auto".
        compile_arguments: arguments of torch.compile, such as ``dynamic``.

    Raises:
        OptionError: an argument is unknown or has an invalid value; in training: ``TrainingArguments(fp16=True)``,
            which has another scaler, or a Trainer whose optimizer is not Accelerate's.
    """

    def __init__(
        self,
        policy: str | Policy = "auto",
        scaler: ScalerLike = None,
        options: Mapping[str, Any] | None = None,
        drop_logits: bool = False,
        **compile_arguments: Any,
    ) -> None:
        self._arguments = {"policy": policy, "scaler": scaler, "options": options, **compile_arguments}
        if drop_logits:
            self._arguments["drop_logits"] = True
        if _LOST in self._arguments.values():
            raise OptionError(
                "FxampCallback was made with objects that a checkpoint cannot hold; leave "
                "restore_callback_states_from_checkpoint out: the scaler's state is restored without it"
            )
        self._setup = setup(
            "FxampCallback",
            _dropping(policy) if drop_logits else policy,
            scaler,
            options,
            compile_arguments,
            own=["drop_logits"],
        )
        self._compiled: torch.nn.Module | None = None
        self.restored: dict[str, Any] | None = None

    @property
    def scaler(self) -> Any:
        """The scaler; None if the policy needs none."""
        return self._setup.scaler

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Compile the model, also for a Trainer that only evaluates."""
        self._compile(others.get("model"))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Compile the model if the Trainer has replaced it, and take over the step."""
        if args.fp16:
            raise OptionError(
                "TrainingArguments(fp16=True) brings a scaler of its own; leave it out: float16 and its scaler come "
                'with FxampCallback(policy="cuda-float16")'
            )
        model = others["model"]
        self._compile(model)
        if self.scaler is not None and any(p.dtype == torch.float16 for p in model.parameters()):
            raise OptionError("the model's parameters are float16; a scaler needs parameters in float32")
        make_scale(self._setup, model)
        take_over(others["optimizer"], self.scaler)
        saved = self.restored or _saved(state)
        if saved is not None and self.scaler is not None:
            self.scaler.load_state_dict(saved)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Let the scaler raise its errors, because the Trainer never calls it with the loss."""
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device="cpu"))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Add the scale and the skipped steps to the logs and the history; waits for the device."""
        if self.scaler is None or logs is None or "loss" not in logs:
            return
        shown = {"loss_scale": self.scaler.loss_scale, "skipped_steps": self.scaler.skipped_steps}
        logs.update(shown)
        if state.log_history:
            state.log_history[-1].update(shown)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: the arguments, and the scaler's state."""
        attributes = {} if self.scaler is None else {"restored": self.scaler.state_dict()}
        return {"args": {name: _plain(value) for name, value in self._arguments.items()}, "attributes": attributes}

    def _compile(self, model: Any) -> None:
        if model is None or model is self._compiled:
            return
        if "drop_logits" in self._arguments and vars(model).get("loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # its loss; otherwise transformers logs first, which breaks the graph
        self._setup.compile_in_place(model)
        self._compiled = model


def _dropping(policy: str | Policy) -> Policy:
    """Return ``policy`` with :data:`DROP_LOGITS`."""
    if policy == "auto":
        raise OptionError(
            'drop_logits=True needs a named policy, but policy is "auto"; accepted: a name, a path or a Policy'
        )
    policy = policy if isinstance(policy, Policy) else Policy.load(policy)
    return replace(policy, rules=(*policy.rules, DROP_LOGITS))


def _saved(state: TrainerState) -> Any:
    """Return the scaler's state in the checkpoint that training resumes from."""
    saved: Any = state.stateful_callbacks
    return saved.get(FxampCallback.__name__, {}).get("attributes", {}).get("restored")


def _plain(value: Any) -> Any:
    """Return ``value`` in a form that JSON can represent."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else _LOST
