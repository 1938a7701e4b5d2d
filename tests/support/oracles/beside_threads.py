"""What other threads do while one thread traces: they run compiled models and eager code, as if nothing were traced."""

from threading import Thread

import torch
from torch import Tensor, nn


class Beside:
    """Another thread's work, and its results when nothing is traced; ``run`` repeats it in a thread of its own.

    It compiles nothing: for that it would wait until the trace ends. ``by_torch``: torch itself may be at work, which
    patches modules and says to all threads that something is compiled.
    """

    def __init__(self, by_torch: bool = False) -> None:
        self.by_torch, self.runs = by_torch, 0
        self.errors: list[Exception] = []
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.compiled = torch.compile(self.model.forward, backend="eager")
        self.call = nn.Module.__call__
        self.expected = self._work()

    def run(self) -> None:
        """Do the work in another thread, and wait for it; ``errors`` gets what it raises."""
        thread = Thread(target=self._checked)
        thread.start()
        thread.join()
        self.runs += 1

    def _checked(self) -> None:
        try:
            compiled, eager = self._work()
            assert torch.equal(compiled, self.expected[0])
            if not self.by_torch:
                assert nn.Module.__call__ is self.call, "nn.Module is patched"
                assert not torch.compiler.is_compiling(), "it takes itself to be compiled"
                assert torch.equal(eager, self.expected[1])
        except Exception as error:
            self.errors.append(error)  # tracing swallows what is raised in it

    def _work(self) -> list[Tensor]:
        """Results of a compiled model, and of an eager optimizer, which reads whether it is compiled."""
        weight = nn.Parameter(torch.linspace(0.1, 1, 7))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        for _ in range(3):
            weight.grad = weight.detach() ** 2
            optimizer.step()
        with torch.no_grad():
            return [self.compiled(torch.ones(2, 4)), weight.detach()]
