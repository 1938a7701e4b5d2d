"""Real models learn: ten AdamW steps on one batch bring its loss down."""

import torch
from model_runs import Baseline, Compiled


def test_ten_steps_bring_the_loss_down(base: Baseline, aot_eager: Compiled) -> None:
    aot_eager.model.load_state_dict(base.weights[0])
    optimizer = torch.optim.AdamW(aot_eager.model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = aot_eager.model(**base.batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < min(losses[:3])
