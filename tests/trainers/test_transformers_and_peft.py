"""transformers: the Trainer with ``bf16=True``, accumulation, clipping and a schedule; the adapters of peft."""

import torch
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import nn

transformers = library("transformers")
peft = library("peft")

#: Why numbers differ from eager autocast's.
WIDER = "Dynamo leaves what a Llama's norms return in float32"


def decoder() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def fit(way: Way, model: nn.Module, folder: str) -> nn.Module:
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (24, 8)).tolist()]
    arguments = transformers.TrainingArguments(
        folder, bf16=way.mixed, use_cpu=True, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2,
        gradient_accumulation_steps=2, max_grad_norm=1.0, warmup_steps=1, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    collate = transformers.default_data_collator
    transformers.Trainer(way.compile(model), arguments, train_dataset=rows, data_collator=collate).train()
    return model


@each_variant(inductor=True)
def test_the_trainer(variant: Variant) -> None:
    assert_trains_alike(full, variant, inexact=WIDER if variant.lowering == "eager" else "")


@each_variant()
def test_adapters(variant: Variant) -> None:
    assert_trains_alike(adapted, variant, inexact=WIDER if variant.lowering == "eager" else "")


def full(way: Way) -> nn.Module:
    return fit(way, decoder(), "unused")


def adapted(way: Way) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return fit(way, peft.get_peft_model(decoder(), config), "unused")
