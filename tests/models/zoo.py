"""The models under test: tiny random configurations of real architectures; nothing is downloaded.

Dropout is off, so that one seed gives one loss; models are in training mode, as they are built. Token batches end in
padding where the model takes a mask: with a mask of ones transformers drops it in eager mode and keeps it compiled,
which would compare two programs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

VOCABULARY = 64

#: A small batch by argument name, the labels among it.
Batch = dict[str, Any]
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
ENCODER = {name: value for name, value in TEXT.items() if name != "vocab_size"}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "state_size": 4,
    "time_step_rank": 4,
    # The scan is used only when compiled: the two sides would run different programs.
    "use_associative_scan": False,
}


@dataclass(frozen=True)
class Spec:
    """How to build a model and its batch.

    ``float64``: how to build the float64 twin where the model's own kernels have no float64 (same weights).
    ``variant``: another implementation of an architecture above, so compiled for one lowering only.
    ``seed``: of weights and batch.
    """

    build: Callable[[], torch.nn.Module]
    batch: Callable[[], Batch]
    float64: Callable[[], torch.nn.Module] | None = None
    variant: bool = False
    seed: int = 0


def build(spec: Spec) -> tuple[torch.nn.Module, Batch]:
    """The model and its batch, the same at each call."""
    torch.manual_seed(spec.seed)
    return spec.build(), spec.batch()


def build_float64(spec: Spec) -> torch.nn.Module:
    """The float64 twin of the model; its weights are to be loaded."""
    return (spec.float64 or spec.build)().double()


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 8))


def text() -> Batch:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _classified_text() -> Batch:
    tokens = _tokens()
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([0, 1])}


def _images(size: int = 16) -> Batch:
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.tensor([0, 1, 1, 0])}


def _spectrograms() -> Batch:
    return {"input_features": torch.randn(2, 8, 32), "labels": _tokens()}


def _waves() -> Batch:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 32, (2, 6))}


def _gpt2(attention: str = "sdpa") -> torch.nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=1,
        n_head=4,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=attention,
    )
    return hf.GPT2LMHeadModel(config)


def _bert() -> torch.nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT, **DROPOUT))


def _t5() -> torch.nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _llama(attention: str = "sdpa") -> torch.nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=2, attn_implementation=attention))


def _qwen3() -> torch.nn.Module:
    config = hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8, attn_implementation="eager")
    return hf.Qwen3ForCausalLM(config)


def _mixtral(experts: str = "grouped_mm") -> torch.nn.Module:
    config = hf.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4, experts_implementation=experts)
    return hf.MixtralForCausalLM(config)


def _mamba() -> torch.nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(**MAMBA))


def _vit() -> torch.nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**ENCODER, **DROPOUT, image_size=16, patch_size=8))


def _swin() -> torch.nn.Module:
    config = hf.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        attn_implementation="eager",
        **DROPOUT,
    )
    return hf.SwinForImageClassification(config)


def _resnet() -> torch.nn.Module:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2, layer_type="basic")
    return hf.ResNetForImageClassification(config)


def _whisper() -> torch.nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return hf.WhisperForConditionalGeneration(config)


def _wav2vec2() -> torch.nn.Module:
    config = hf.Wav2Vec2Config(
        **{**TEXT, "vocab_size": 32},
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        activation_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
    )
    return hf.Wav2Vec2ForCTC(config)


def _deberta() -> torch.nn.Module:
    config = hf.DebertaV2Config(
        **TEXT,
        **DROPOUT,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        pooler_dropout=0.0,
    )
    return hf.DebertaV2ForSequenceClassification(config)


MODELS: dict[str, Spec] = {
    "gpt2": Spec(_gpt2, text),
    "gpt2-eager-attention": Spec(lambda: _gpt2("eager"), text, variant=True),
    "bert": Spec(_bert, _classified_text),
    "t5": Spec(
        _t5, text, seed=3
    ),  # its attention is unscaled, so saturated: with other seeds few elements make the error
    "llama": Spec(_llama, text),
    "llama-eager-attention": Spec(lambda: _llama("eager"), text, variant=True),
    "qwen3": Spec(_qwen3, text),
    "mixtral": Spec(_mixtral, text, float64=lambda: _mixtral("eager")),
    "mixtral-looped-experts": Spec(lambda: _mixtral("eager"), text, variant=True),
    "mamba": Spec(_mamba, text),
    "vit": Spec(_vit, _images),
    "swin": Spec(_swin, _images),
    "resnet": Spec(_resnet, _images),
    "whisper": Spec(_whisper, _spectrograms),
    "wav2vec2": Spec(_wav2vec2, _waves),
    "deberta-v2": Spec(_deberta, _classified_text),
}
