"""Python source text: a byte-level transformer on the running Python's own standard library."""

import math
import sysconfig
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from gossipdp.workloads.byte_transformer import NUM_BYTES, ByteTransformer
from gossipdp.workloads.source_text import read_source_text
from gossipdp.workloads.workload import BatchLoader, Workload, check_worker, evaluating, worker_seed


@final
class PyStdlib(Workload):
    """The next byte of Python source files; validation in bits per byte, lower is better.

    The text is real, large enough not to be memorised in a demo (about 10 MB), and on every
    machine that runs Python. It is read once and kept in memory only.

    root: the directory of the text; None takes the standard library of the running Python.
    disjoint: the workers get different top-level packages and modules, of about equal size, so
        their data is not identically distributed.

    >>> stdlib = PyStdlib()
    >>> next(iter(stdlib.train_loader(rank=0, num_workers=4, seed=0))).shape
    torch.Size([8, 129])
    """

    name = "pystdlib"
    metric_name = "validation_bits_per_byte"
    higher_is_better = False
    default_batch_size = 8
    default_budget_samples = 6_000
    context = 128
    num_validation_windows = 256

    def __init__(
        self,
        *,
        disjoint: bool = False,
        batch_size: int | None = None,
        root: Path | None = None,
    ) -> None:
        super().__init__(disjoint=disjoint, batch_size=batch_size)
        self.root = Path(sysconfig.get_path("stdlib")) if root is None else root

    def make_model(self) -> nn.Module:
        return ByteTransformer(width=128, depth=2, num_heads=4, context=self.context)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        decayed = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))

    def train_loader(self, rank: int, num_workers: int, seed: int) -> BatchLoader[Tensor]:
        check_worker(rank, num_workers, seed)
        text = read_source_text(self.root)
        tokens = text.train(text.shares(num_workers)[rank] if self.disjoint else None)
        # Windows overlap by one byte: the last target of one is the first input of the next.
        starts = torch.arange(0, len(tokens) - self.context, self.context)
        offsets = torch.arange(self.context + 1)
        return BatchLoader(
            starts,
            batch_size=self.batch_size,
            seed=worker_seed(seed, rank),
            gather=lambda chosen: tokens[chosen.unsqueeze(1) + offsets].long(),
        )

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats; batch: (batch, context + 1)."""
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.reshape(-1, NUM_BYTES), batch[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> float:
        """Mean cross-entropy in bits per byte over fixed, evenly spaced held-out windows."""
        tokens = read_source_text(self.root).validation()
        last_start = len(tokens) - self.context - 1
        num_windows = min(self.num_validation_windows, last_start // self.context + 1)
        starts = torch.linspace(0, last_start, num_windows).long()
        windows = tokens[starts.unsqueeze(1) + torch.arange(self.context + 1)].long()
        nats = 0.0
        with evaluating(model):
            for batch in torch.split(windows, 32):
                nats += float(self.loss(model, batch)) * len(batch)
        return nats / num_windows / math.log(2)
