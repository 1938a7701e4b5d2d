"""pytorch-tabnet: ``TabNetClassifier.fit``, whose sparsemax is an autograd.Function that saves its output."""

import numpy as np
from support.oracles.three_ways import CAST_ONCE, Variant, Way, assert_trains_alike, each_variant, library
from torch import nn

tabnet = library("pytorch_tabnet.tab_model")


#: The encoder has the norm that is used.
UNUSED = ("tabnet.initial_bn.weight", "tabnet.initial_bn.bias")


def train(way: Way) -> nn.Module:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(64, 6)).astype(np.float32), generator.integers(2, size=64)

    class Classifier(tabnet.TabNetClassifier):
        def _set_network(self) -> None:
            super()._set_network()
            way.cast_forward(self.network)
            way.compile(self.network)

    classifier = Classifier(n_d=4, n_a=4, n_steps=2, verbose=0, device_name="cpu", mask_type="sparsemax")
    classifier.fit(x, y, max_epochs=2, batch_size=16, virtual_batch_size=8, drop_last=True)
    return classifier.network


@each_variant()
def test_fit(variant: Variant) -> None:
    assert_trains_alike(train, variant, outside=UNUSED, inexact="" if variant.lowering == "eager" else CAST_ONCE)
