"""skorch: ``NeuralNetClassifier.fit``, which validates after each epoch."""

import numpy as np
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import Tensor, nn

skorch = library("skorch")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).relu()).softmax(-1)


def train(way: Way) -> nn.Module:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(48, 12)).astype(np.float32), generator.integers(3, size=48)
    net = skorch.NeuralNetClassifier(Net, max_epochs=3, batch_size=8, lr=0.1, verbose=0, iterator_train__shuffle=True)
    net.initialize()
    way.cast_forward(net.module_)
    way.compile(net.module_)
    net.partial_fit(x, y)
    return net.module_


@each_variant(inductor=True)
def test_fit(variant: Variant) -> None:
    assert_trains_alike(train, variant)
