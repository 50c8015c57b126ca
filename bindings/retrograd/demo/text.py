"""A small character-level transformer on Python's own documentation, every block under a reentrant checkpoint."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from retrograd.demo.report import EnterEngine

TITLE = "text: transformer, reentrant checkpoints"
STEPS = 800
SEED = 11
BLOCKS = 4
WIDTH = 64
HEADS = 4
CONTEXT = 48
BATCH = 8
DROPOUT = 0.05


def documentation_text() -> str:
    """Give the text that ``help('topics')`` shows, which ships with Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.projection(attended.transpose(1, 2).reshape(x.shape)), DROPOUT)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), DROPOUT)


class _Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, time) of character numbers to (batch, time, characters) of logits."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


class TextTrainer:
    """Trains the transformer; see ``report.Trainer``."""

    models = 1
    backward_calls_per_step = 1 + BLOCKS
    nested_calls_per_step = BLOCKS

    def __init__(self) -> None:
        text = documentation_text()
        alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(alphabet)}
        self._text = torch.tensor([number[character] for character in text])
        torch.manual_seed(SEED)
        self._model = _Transformer(len(alphabet))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-3, foreach=True)
        self._losses: list[torch.Tensor] = []

    def advance(self, steps: int, enter_engine: EnterEngine) -> None:
        """Train for some steps in the calling thread, with one intra-op thread."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with enter_engine():
                for _ in range(steps):
                    self._step()
        finally:
            torch.set_num_threads(threads)

    def _step(self) -> None:
        # The seed of the batch and of the dropout masks; the job's other run gets the same ones.
        torch.manual_seed(SEED + 1 + len(self._losses))
        starts = torch.randint(len(self._text) - CONTEXT, (BATCH, 1))
        window = self._text[starts + torch.arange(CONTEXT + 1)]
        self._optimizer.zero_grad()
        logits = self._model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._losses.append(loss.detach())

    def losses(self) -> list[list[float]]:
        """Give the losses of the one model."""
        return [torch.stack(self._losses).tolist()]

    def summary(self) -> str:
        """Give the loss at the start and at the end."""
        losses = self.losses()[0]
        last = losses[-20:]
        return f"text: loss {losses[0]:.2f} at the start, {sum(last) / len(last):.2f} at the end (nats per character)"

    def close(self) -> None:
        """Do nothing: the job has no threads of its own."""
