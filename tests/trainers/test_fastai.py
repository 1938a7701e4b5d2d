"""fastai: ``Learner.fit_one_cycle``, with schedules of rates and momenta, and an optimizer of its own."""

import torch
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import Tensor, nn
from torch.utils.data import TensorDataset

library("fastai.learner")
basics = library("fastai.basics")
schedules = library("fastai.callback.schedule")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(32, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.cells(self.table(words)).mean(1))


def train(way: Way) -> nn.Module:
    data = [TensorDataset(torch.randint(32, (count, 6)), torch.randint(4, (count,))) for count in (24, 8)]
    loaders = basics.DataLoaders(*(basics.DataLoader(part, 8, num_workers=0) for part in data), device="cpu")
    model = Net()
    way.cast_forward(model)
    learner = basics.Learner(loaders, way.compile(model), loss_func=nn.CrossEntropyLoss(), opt_func=basics.Adam)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(2, 1e-2)
    return model


@each_variant()
def test_one_cycle(variant: Variant) -> None:
    assert_trains_alike(train, variant)
