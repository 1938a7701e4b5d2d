"""Models of torchvision: classification, segmentation, detection, optical flow, video."""

from collections.abc import Callable
from typing import Any

import torch
from corpus_loss import WithLoss
from zoo import Batch, Spec


def _spec(build: Callable[[Any], torch.nn.Module], batch: Callable[[], Batch]) -> Spec:
    def wrapped() -> torch.nn.Module:
        import torchvision.models

        return WithLoss(build(torchvision.models))

    return Spec(wrapped, batch)


def _images(size: int = 32) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(2, 3, size, size)}


def _input(*shape: int) -> Callable[[], Batch]:
    return lambda: {"input": torch.randn(shape)}


def _detection() -> Batch:
    boxes = torch.tensor([[5.0, 5.0, 40.0, 50.0], [20.0, 10.0, 60.0, 60.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(2)]
    return {"images": [torch.rand(3, 64, 64) for _ in range(2)], "targets": targets}


def _detector(models: Any, kind: str) -> torch.nn.Module:
    network = models.resnet.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], norm_layer=torch.nn.BatchNorm2d)
    backbone = models.detection.backbone_utils._resnet_fpn_extractor(network, 5)
    return getattr(models.detection, kind)(backbone, num_classes=4, min_size=64, max_size=64)


def _convnext(models: Any) -> torch.nn.Module:
    blocks = [models.convnext.CNBlockConfig(8, 16, 1), models.convnext.CNBlockConfig(16, None, 1)]
    return models.ConvNeXt(blocks, num_classes=4)


def _swin(models: Any, version: int) -> torch.nn.Module:
    of = models.swin_transformer
    parts = {"block": of.SwinTransformerBlockV2, "downsample_layer": of.PatchMergingV2} if version == 2 else {}
    return of.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=4, **parts)


MODELS: dict[str, Spec] = {
    f"torchvision-{name}": _spec(build, batch)
    for name, build, batch in (
        ("convnext", _convnext, _images()),
        ("densenet", lambda m: m.DenseNet(8, (2, 2), 16, num_classes=4), _images()),
        ("densenet-checkpointed", lambda m: m.DenseNet(8, (2, 2), 16, num_classes=4, memory_efficient=True), _images()),
        ("fcos", lambda m: _detector(m, "FCOS"), _detection),
        (
            "lraspp",
            lambda m: m.segmentation.lraspp_mobilenet_v3_large(num_classes=4, weights_backbone=None),
            _input(2, 3, 32, 32),
        ),
        ("mobilenet-v2", lambda m: m.mobilenet_v2(num_classes=4, width_mult=0.25, dropout=0.0), _images()),
        ("retinanet", lambda m: _detector(m, "RetinaNet"), _detection),
        ("resnext", lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], 4, groups=4, width_per_group=4), _images()),
        ("shufflenet", lambda m: m.shufflenetv2.ShuffleNetV2([1, 1, 1], [8, 16, 32, 64, 64], num_classes=4), _images()),
        ("squeezenet", lambda m: m.squeezenet1_1(num_classes=4, dropout=0.0), _images()),
        ("swin", lambda m: _swin(m, 1), _images()),
        ("swin-v2", lambda m: _swin(m, 2), _images()),
        ("vit", lambda m: m.VisionTransformer(32, 8, 1, 4, 32, 64, num_classes=4), _images()),
    )
}
