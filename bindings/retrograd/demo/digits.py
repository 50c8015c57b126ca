"""Eight small networks on scikit-learn's handwritten digits, each trained by a thread of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from retrograd.demo.report import EnterEngine

TITLE = "digits: eight MLPs, one per thread"
STEPS = 2000
MODELS = 8
HIDDEN_LAYERS = 8
WIDTH = 64
BATCH = 32
HELD_OUT = 360


def _network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(HIDDEN_LAYERS):
        linear = nn.Linear(WIDTH, WIDTH)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


class _Model:
    """One network, its optimizer and its own order of the training images. Used by one thread at a time."""

    def __init__(self, seed: int, images: torch.Tensor, labels: torch.Tensor) -> None:
        torch.manual_seed(seed)
        self.network = _network()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, momentum=0.9, foreach=True)
        self.order = torch.Generator().manual_seed(seed)
        self.images = images
        self.labels = labels
        self.losses: list[torch.Tensor] = []

    def train(self, steps: int, enter_engine: EnterEngine) -> None:
        # OpenMP's thread count belongs to the thread that sets it.
        torch.set_num_threads(1)
        with enter_engine():
            for _ in range(steps):
                batch = torch.randint(len(self.images), (BATCH,), generator=self.order)
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.network(self.images[batch]), self.labels[batch])
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.detach())


class DigitsTrainer:
    """Trains the eight networks; see ``report.Trainer``."""

    models = MODELS
    backward_calls_per_step = MODELS
    nested_calls_per_step = 0

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        x = torch.from_numpy(images).float()[shuffled] / 16
        y = torch.from_numpy(labels).long()[shuffled]
        self._held_out = x[:HELD_OUT], y[:HELD_OUT]
        self._models = [_Model(seed, x[HELD_OUT:], y[HELD_OUT:]) for seed in range(MODELS)]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"digits-{i}") for i in range(MODELS)]

    def advance(self, steps: int, enter_engine: EnterEngine) -> None:
        """Train every network for some steps, all at the same time."""
        pairs = zip(self._threads, self._models, strict=True)
        running = [thread.submit(model.train, steps, enter_engine) for thread, model in pairs]
        wait(running)
        for future in running:
            future.result()

    def losses(self) -> list[list[float]]:
        """Give the losses, one list for each network."""
        return [torch.stack(model.losses).tolist() for model in self._models]

    def summary(self) -> str:
        """Give the mean accuracy on images that were not trained on."""
        x, y = self._held_out
        with torch.no_grad():
            right = [(model.network(x).argmax(1) == y).float().mean().item() for model in self._models]
        return f"digits: mean accuracy {sum(right) / len(right):.1%} on {HELD_OUT} held-out images"

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown()
