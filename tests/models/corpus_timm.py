"""Vision models of timm: one or two of a family, at 28 to 64 pixels, with few layers where the constructor lets one."""

from typing import Any

import torch
from corpus_loss import WithLoss
from zoo import Spec


def _spec(name: str, size: int = 64, **options: Any) -> Spec:
    def build() -> torch.nn.Module:
        import timm

        return WithLoss(timm.create_model(name, num_classes=4, **options))

    return Spec(build, lambda: {"x": torch.randn(2, 3, size, size)})


_SMALL_IMAGE = {"img_size": 32, "depth": 1}
_WINDOWS = {"img_size": 32, "window_size": 4, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}

_SPECS = (
    ("beit_base_patch16_224", 32, {**_SMALL_IMAGE, "embed_dim": 48, "num_heads": 4}),
    ("cait_xxs24_224", 32, {**_SMALL_IMAGE, "embed_dim": 48, "num_heads": 4}),
    ("convnext_atto", 32, {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16)}),
    ("cs3darknet_focus_s", 32, {}),
    ("deit_tiny_distilled_patch16_224", 32, _SMALL_IMAGE),
    ("dla46x_c", 64, {}),
    ("edgenext_xx_small", 64, {}),
    ("eva02_tiny_patch14_224", 28, {"img_size": 28, "depth": 1}),
    ("fasternet_t0", 64, {}),
    ("gemma4_vit_167m", 32, {**_SMALL_IMAGE, "embed_dim": 48, "num_heads": 4}),
    ("gmlp_ti16_224", 32, {"img_size": 32}),
    ("legacy_seresnet18", 32, {}),
    ("levit_128s", 64, {"img_size": 64}),
    ("mixer_s32_224", 64, {"img_size": 64}),
    ("mobilenetv3_small_050", 32, {}),
    ("naflexvit_base_patch16_gap", 32, {"depth": 1, "embed_dim": 48, "num_heads": 4}),
    ("pit_ti_224", 64, {"img_size": 64}),
    ("poolformerv2_s12", 32, {}),
    ("pvt_v2_b0", 64, {"depths": (1, 1, 1, 1)}),
    ("regnetx_002", 32, {}),
    ("resnetv2_18", 32, {}),
    ("sequencer2d_s", 32, {"img_size": 32, "layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32)}),
    ("skresnet18", 32, {}),
    ("starnet_s050", 64, {}),
    ("swin_tiny_patch4_window7_224", 32, _WINDOWS),
    ("swinv2_tiny_window8_256", 32, _WINDOWS),
    ("test_byobnet", 32, {}),
    ("test_coatnet", 64, {"img_size": 64}),
    ("test_efficientnet", 32, {}),
    ("test_mambaout", 32, {}),
    ("test_nfnet", 64, {}),
    ("test_resnet", 32, {}),
    ("test_vit", 32, {"img_size": 32}),
    ("tnt_s_legacy_patch16_224", 32, _SMALL_IMAGE),
)

MODELS: dict[str, Spec] = {f"timm-{name}": _spec(name, size, **options) for name, size, options in _SPECS}
