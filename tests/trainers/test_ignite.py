"""PyTorch-Ignite: its supervised trainer, with its own autocast."""

import torch
from support.oracles.three_ways import Variant, Way, assert_trains_alike, each_variant, library
from torch import Tensor, nn

ignite = library("ignite.engine")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((-2, -1)))


def train(way: Way) -> nn.Module:
    model = way.compile(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = ignite.create_supervised_trainer(
        model, optimizer, nn.CrossEntropyLoss(), device="cpu", gradient_accumulation_steps=2
    )
    with way.autocast():
        trainer.run([(torch.randn(4, 1, 8, 8), torch.randint(3, (4,))) for _ in range(6)], max_epochs=2)
    return model


@each_variant(inductor=True)
def test_the_supervised_trainer(variant: Variant) -> None:
    assert_trains_alike(train, variant)
