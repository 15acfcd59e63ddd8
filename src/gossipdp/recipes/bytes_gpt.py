"""A small GPT on the bytes of any text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

from gossipdp.parallel.schedule import parameter_groups
from gossipdp.recipes.batches import whole_batches
from gossipdp.recipes.options import BytesGptOptions
from gossipdp.recipes.recipe import Recipe, check_samples, worker_device
from gossipdp.recipes.text_data import read_text
from gossipdp.workloads.byte_transformer import NUM_BYTES, ByteTransformer
from gossipdp.workloads.workload import evaluating, learning_rate_factor

WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.95)
EVALUATION_BYTES = 1 << 20
"""At most so many held-out bytes are evaluated."""


@final
class BytesGpt(Recipe[Tensor]):
    """A decoder-only transformer with tied embeddings, AdamW; see ``BytesGptOptions``."""

    metric_name = "validation_bits_per_byte"

    def __init__(self, options: BytesGptOptions) -> None:
        super().__init__(worker_device(options.device))
        self.train, self.validation = read_windows(options)
        self._options = options

    @property
    def num_samples(self) -> int:
        return len(self.train)

    def make_model(self) -> nn.Module:
        options = self._options
        model: nn.Module = ByteTransformer(
            width=options.width,
            depth=options.depth,
            num_heads=options.heads,
            context=options.context,
        )
        return model.to(self.device)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(model, WEIGHT_DECAY)
        return torch.optim.AdamW(groups, lr=self._options.learning_rate, betas=BETAS)

    def make_schedule(
        self, optimizer: torch.optim.Optimizer, progress: Callable[[], float], num_workers: int
    ) -> LRScheduler:
        return LambdaLR(optimizer, lambda _: learning_rate_factor(progress()))

    def loader(self, seed: int) -> DataLoader[Tensor]:
        return whole_batches(self.train, self._options.batch_size, seed=seed)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return next_byte_loss(model, batch.to(self.device))

    def evaluate(self, model: nn.Module) -> float:
        """Bits per byte over the held-out text's first megabyte."""
        loader = whole_batches(self.validation, self._options.batch_size)
        return bits_per_byte(model, loader, self.device)


class Windows(Dataset[Tensor]):
    """Windows of ``context`` + 1 bytes, of which the last is the next one's first; (batch, ...)."""

    def __init__(self, text: Tensor, context: int) -> None:
        self._text = text
        self._context = context
        self._offsets = torch.arange(context + 1)

    def __len__(self) -> int:
        return max(0, len(self._text) - 1) // self._context

    def __getitems__(self, numbers: list[int]) -> Tensor:
        """What a DataLoader fetches at once: the batch as a whole, int64."""
        starts = torch.tensor(numbers) * self._context
        return self._text[starts[:, None] + self._offsets].long()


def read_windows(options: BytesGptOptions) -> tuple[Windows, Windows]:
    """Windows of the text to train on, and of what is held out.

    Raises:
        FileNotFoundError: there is no such text.
        ValueError: it does not fill one batch, or one window that is held out.
    """
    text = read_text(options.data)
    train, validation = (Windows(part, options.context) for part in (text.train, text.validation))
    check_samples("the text", len(train), options.batch_size)
    if not len(validation):
        raise ValueError(
            f"{len(text.validation)} bytes are held out, less than one window of "
            f"--context {options.context}; give more text or a smaller --context"
        )
    return train, validation


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte in nats; windows: (batch, context + 1), int64."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.reshape(-1, NUM_BYTES), windows[:, 1:].reshape(-1))


def bits_per_byte(model: nn.Module, loader: Iterable[Tensor], device: torch.device) -> float:
    """Mean cross-entropy of the next byte in bits, over ``loader``'s first megabyte of windows."""
    nats, num_bytes = 0.0, 0
    with evaluating(model):
        for batch in loader:
            windows = batch.to(device)
            count = windows[:, 1:].numel()
            nats += float(next_byte_loss(model, windows)) * count
            num_bytes += count
            if num_bytes >= EVALUATION_BYTES:
                break
    return nats / num_bytes / math.log(2)
