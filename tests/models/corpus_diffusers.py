"""Diffusion transformers, U-Nets and autoencoders of diffusers, with one layer of each kind."""

from collections.abc import Callable
from typing import Any

import torch
from corpus_loss import WithLoss
from torch import randn
from zoo import Batch, Spec


def _spec(kind: str, batch: Callable[[], Batch], **options: Any) -> Spec:
    def build() -> torch.nn.Module:
        import diffusers

        return WithLoss(getattr(diffusers, kind)(**options))

    return Spec(build, lambda: {**batch(), "return_dict": False})


_STEPS = {"timestep": torch.tensor([3, 7])}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_IMAGE = {"in_channels": 4, "out_channels": 4}


def _places(count: int, axes: int = 3) -> torch.Tensor:
    return torch.arange(count).float()[:, None].expand(count, axes) % 4


def _latents(text: int, **more: Any) -> Batch:
    return {"hidden_states": randn(2, 4, 8, 8), "encoder_hidden_states": randn(2, 6, text), **_STEPS, **more}


def _sequence(axes: int, **more: Any) -> Batch:
    places = {"img_ids": _places(8, axes), "txt_ids": _places(6, axes)}
    text = {"encoder_hidden_states": randn(2, 6, 32), "timestep": torch.tensor([0.3, 0.7])}
    return {"hidden_states": randn(2, 8, 4), **text, **places, **more}


def _video(frames: int, **more: Any) -> Batch:
    latents = {"hidden_states": randn(1, 4, frames, 8, 8), "encoder_hidden_states": randn(1, 6, 16)}
    return {**latents, "timestep": torch.tensor([3]), **more}


def _hunyuan_video() -> Batch:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    return _video(1, encoder_attention_mask=mask, pooled_projections=randn(1, 8), guidance=torch.tensor([6.0]))


def _unet() -> Batch:
    return {"sample": randn(2, 4, 8, 8), "encoder_hidden_states": randn(2, 4, 16), **_STEPS}


_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 16,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
}
_FLUX: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
}
_STABLE: dict[str, Any] = {
    "sample_size": 8,
    "num_layers": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 8,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}
_WAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 1,
    "rope_max_seq_len": 32,
}
_PIXART: dict[str, Any] = {
    "num_layers": 1,
    "in_channels": 4,
    "cross_attention_dim": 16,
    "sample_size": 8,
    "caption_channels": 8,
    "norm_num_groups": 4,
    "use_additional_conditions": False,
}
_SANA: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "num_layers": 1,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 8,
    "caption_channels": 8,
    "sample_size": 8,
}
_HUNYUAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}
_PRIOR: dict[str, Any] = {"num_layers": 1, "embedding_dim": 8, "num_embeddings": 7}
_DC: dict[str, Any] = {"latent_channels": 4, "attention_head_dim": 2} | {
    f"{half}_{option}": value
    for half in ("encoder", "decoder")
    for option, value in (
        ("block_types", ("ResBlock", "EfficientViTBlock")),
        ("block_out_channels", (8, 8)),
        ("layers_per_block", (1, 1)),
        ("qkv_multiscales", ((), (5,))),
    )
}
_VAE: dict[str, Any] = {
    "block_out_channels": (4, 8),
    "norm_num_groups": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}


def _picture() -> Batch:
    return {"sample": randn(2, 3, 16, 16)}


def _prior() -> Batch:
    text = {"proj_embedding": randn(2, 8), "encoder_hidden_states": randn(2, 7, 8)}
    return {"hidden_states": randn(2, 8), **text, **_STEPS}


def _classes() -> Batch:
    return {"hidden_states": randn(2, 4, 8, 8), "class_labels": torch.tensor([1, 2]), **_STEPS}


MODELS: dict[str, Spec] = {
    f"diffusers-{name}": spec
    for name, spec in (
        (
            "dit",
            _spec(
                "DiTTransformer2DModel",
                _classes,
                num_layers=1,
                sample_size=8,
                norm_num_groups=4,
                num_embeds_ada_norm=8,
                **_HEADS,
            ),
        ),
        (
            "flux",
            _spec(
                "FluxTransformer2DModel",
                lambda: _sequence(3, pooled_projections=randn(2, 32)),
                patch_size=1,
                pooled_projection_dim=32,
                axes_dims_rope=(4, 4, 8),
                **_FLUX,
            ),
        ),
        (
            "flux-2",
            _spec(
                "Flux2Transformer2DModel",
                lambda: _sequence(4, guidance=torch.tensor([3.0, 3.0])),
                axes_dims_rope=(4, 4, 4, 4),
                **_FLUX,
            ),
        ),
        (
            "sd3",
            _spec(
                "SD3Transformer2DModel",
                lambda: _latents(32, pooled_projections=randn(2, 64)),
                **_STABLE,
                **_HEADS,
                **_IMAGE,
            ),
        ),
        ("wan", _spec("WanTransformer3DModel", lambda: _video(2), **_WAN, **_IMAGE)),
        (
            "pixart",
            _spec(
                "PixArtTransformer2DModel",
                lambda: _latents(8, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
                **_PIXART,
                **_HEADS,
            ),
        ),
        ("sana", _spec("SanaTransformer2DModel", lambda: _latents(8), **_SANA, **_IMAGE)),
        ("hunyuan-video", _spec("HunyuanVideoTransformer3DModel", _hunyuan_video, **_HUNYUAN, **_IMAGE)),
        ("prior", _spec("PriorTransformer", _prior, **_PRIOR, **_HEADS)),
        ("unet", _spec("UNet2DConditionModel", _unet, **_UNET)),
        (
            "unet-upcast",
            _spec("UNet2DConditionModel", _unet, upcast_attention=True, resnet_time_scale_shift="scale_shift", **_UNET),
        ),
        ("vae", _spec("AutoencoderKL", _picture, **_VAE)),
        ("vae-dc", _spec("AutoencoderDC", _picture, **_DC)),
        ("vq", _spec("VQModel", _picture, num_vq_embeddings=16, **_VAE)),
    )
}
