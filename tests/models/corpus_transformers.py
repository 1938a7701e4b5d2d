"""Architectures of transformers that the zoo lacks: routed experts, shared keys, soft caps, other norms."""

import torch
import transformers as hf
from zoo import DROPOUT, ENCODER, MAMBA, TEXT, Batch, Spec, text

_PADDED = {**TEXT, "pad_token_id": 0}


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
        **DROPOUT,
    )
    return hf.SegformerForSemanticSegmentation(config)


MODELS: dict[str, Spec] = {
    "transformers-olmoe": Spec(
        lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**_PADDED, num_experts=4, num_experts_per_tok=2)), text
    ),
    "transformers-gemma2": Spec(
        lambda: hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**_PADDED, num_key_value_heads=2, head_dim=8, attn_implementation="eager")
        ),
        text,
    ),
    "transformers-gpt-neox": Spec(lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_PADDED)), text),
    "transformers-falcon-mamba": Spec(lambda: hf.FalconMambaForCausalLM(hf.FalconMambaConfig(**MAMBA)), text),
    "transformers-albert": Spec(
        lambda: hf.AlbertForMaskedLM(
            hf.AlbertConfig(**_PADDED, **DROPOUT, embedding_size=16, classifier_dropout_prob=0.0)
        ),
        text,
    ),
    "transformers-dinov2": Spec(
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**ENCODER, image_size=16, patch_size=8)), _images
    ),
    "transformers-convnextv2": Spec(
        lambda: hf.ConvNextV2ForImageClassification(
            hf.ConvNextV2Config(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4)
        ),
        _images,
    ),
    "transformers-segformer": Spec(_segformer, _segments),
}
