"""Architectures of transformers that the zoo lacks: routed experts, shared keys, soft caps, other norms."""

from typing import Any

import torch
import transformers as hf
from zoo import VOCABULARY, Batch, Spec

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_VOCABULARY = {key: value for key, value in _TEXT.items() if key not in ("vocab_size", "pad_token_id")}


def _text() -> Batch:
    tokens = torch.randint(3, VOCABULARY, (2, 8))
    return {"input_ids": tokens, "labels": tokens}


def _images() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def _segments() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(2, (2, 32, 32))}


def _segformer() -> torch.nn.Module:
    config = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=2,
        **_QUIET,
    )
    return hf.SegformerForSemanticSegmentation(config)


MODELS: dict[str, Spec] = {
    "transformers-olmoe": Spec(
        lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**_TEXT, num_experts=4, num_experts_per_tok=2)), _text
    ),
    "transformers-gemma2": Spec(
        lambda: hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**_TEXT, num_key_value_heads=2, head_dim=8, attn_implementation="eager")
        ),
        _text,
    ),
    "transformers-gpt-neox": Spec(lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_TEXT)), _text),
    "transformers-falcon-mamba": Spec(
        lambda: hf.FalconMambaForCausalLM(
            hf.FalconMambaConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=1,
                state_size=4,
                time_step_rank=4,
                # The scan is used only when compiled.
                use_associative_scan=False,
            )
        ),
        _text,
    ),
    "transformers-albert": Spec(
        lambda: hf.AlbertForMaskedLM(
            hf.AlbertConfig(**_TEXT, **_QUIET, embedding_size=16, classifier_dropout_prob=0.0)
        ),
        _text,
    ),
    "transformers-dinov2": Spec(
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**_NO_VOCABULARY, image_size=16, patch_size=8)), _images
    ),
    "transformers-convnextv2": Spec(
        lambda: hf.ConvNextV2ForImageClassification(
            hf.ConvNextV2Config(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4)
        ),
        _images,
    ),
    "transformers-segformer": Spec(_segformer, _segments),
}
