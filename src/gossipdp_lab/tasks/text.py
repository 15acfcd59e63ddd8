"""A small GPT on the bytes of any text; by default the source of Python's standard library."""

from __future__ import annotations

import math
import os
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossipdp.parallel.schedule import parameter_groups
from gossipdp_lab.tasks import BytesGptOptions
from gossipdp_lab.tasks.workload import BatchLoader, Workload, evaluating, worker_seed

NUM_BYTES = 256
WEIGHT_DECAY = 0.1

NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
"""Directories of the standard library that are left out: tests, and installed packages."""

NUM_PIECES, HELD_OUT_SHARE = 200, 20
"""The text is cut into 200 equal pieces, and every twentieth of them is held out."""


class Gpt(Workload[Tensor]):
    """The next byte of a text; validation in bits per byte, lower is better.

    With ``disjoint`` each worker has a stretch of the text of its own.
    Batches: (batch, context + 1), int64; the last byte of a window is the next one's first.
    """

    metric_name = "validation_bits_per_byte"
    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)
    num_validation_windows: ClassVar[int] = 4096
    """Windows, evenly spaced over the held-out text, that are evaluated at most."""

    def __init__(self, options: BytesGptOptions, *, disjoint: bool = False) -> None:
        super().__init__(options.batch_size, device=options.device)
        self.options, self.disjoint = options, disjoint
        self.train, self.validation = read_text(options.data)
        self.check_one_batch()
        if len(self.validation) <= options.context:
            raise ValueError(
                f"{len(self.validation)} bytes are held out, less than one window of "
                f"--context {options.context}; give more text or a smaller --context"
            )

    @property
    def num_samples(self) -> int:
        return max(0, len(self.train) - 1) // self.options.context

    def make_model(self) -> nn.Module:
        return ByteTransformer(self.options).to(self.device)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(model, WEIGHT_DECAY)
        return torch.optim.AdamW(groups, lr=self.options.learning_rate, betas=self.betas)

    def train_loader(self, rank: int, num_workers: int, seed: int) -> BatchLoader[Tensor]:
        shuffle = worker_seed(rank, num_workers, seed)
        tokens = self.train.tensor_split(num_workers)[rank] if self.disjoint else self.train
        # Windows overlap by one byte: the last target of one is the first input of the next.
        starts = torch.arange(0, max(0, len(tokens) - self.options.context), self.options.context)
        return BatchLoader(
            starts,
            batch_size=self.batch_size,
            seed=shuffle,
            gather=lambda chosen: self._windows(tokens, chosen),
        )

    def _windows(self, tokens: Tensor, starts: Tensor) -> Tensor:
        offsets = torch.arange(self.options.context + 1)
        return tokens[starts.unsqueeze(1) + offsets].long().to(self.device)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next byte, in nats."""
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.reshape(-1, NUM_BYTES), batch[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean cross-entropy in bits per byte over fixed, evenly spaced windows."""
        last_start = len(self.validation) - self.options.context - 1
        num_windows = min(self.num_validation_windows, last_start // self.options.context + 1)
        nats = 0.0
        with evaluating(model):
            places = torch.linspace(0, last_start, num_windows, dtype=torch.float64).long()
            for starts in torch.split(places, 32):
                windows = self._windows(self.validation, starts)
                nats += float(self.loss(model, windows)) * len(starts)
        return nats / num_windows / math.log(2)


@final
class PyStdlib(Gpt):
    """The demo's text, the source of the running Python's standard library, for a small network.

    It has 70,592 parameters, and a step takes 6 ms of one core. The learning rate was tuned with 4
    workers: see ``demo/compare.py``. changes: options of the recipe other than these.
    """

    num_validation_windows = 1024
    betas = (0.9, 0.999)

    def __init__(self, *, disjoint: bool = False, **changes: Any) -> None:
        network = BytesGptOptions(
            batch_size=8, context=64, width=64, depth=1, heads=4, learning_rate=1.6e-2
        )
        super().__init__(replace(network, **changes), disjoint=disjoint)


@final
class ByteTransformer(nn.Module):
    """Bytes of shape (batch, length) to logits of the next byte, (batch, length, 256).

    Decoder-only; the output layer shares its weight with the embedding: one parameter under two
    names.
    """

    def __init__(self, options: BytesGptOptions) -> None:
        super().__init__()
        width = options.width
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.empty(options.context, width))
        self.blocks = nn.Sequential(*(_Block(width, options.heads) for _ in range(options.depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        joint = self.queries_keys_values(self.norm_attention(hidden))
        heads = joint.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = hidden + self.mlp(hidden)
        return result


def read_text(path: Path | None) -> tuple[Tensor, Tensor]:
    """Return the training and the held-out bytes (1-D, uint8) of a folder or a file.

    Files follow one another in the order of their paths, a zero byte after each. Files that are not
    UTF-8 or have zero bytes are left out, and so are hidden folders. None: the Python files of the
    standard library, without its tests.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: there is no text, or too little to train on some and hold others out.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    if not root.exists():
        raise FileNotFoundError(f"there is no {root.absolute()}; name a folder of text with --data")
    paths = [root] if root.is_file() else []
    for folder, subfolders, names in os.walk(root):
        # Pruned before they are entered: site-packages alone can be larger than the library.
        subfolders[:] = [
            name
            for name in subfolders
            if name[0] != "." and not (path is None and name in NOT_THE_LIBRARY)
        ]
        paths += [
            Path(folder, name)
            for name in names
            if name[0] != "." and (path is not None or name.endswith(".py"))
        ]
    content = bytearray()
    for each in sorted(paths):
        one = each.read_bytes()
        if _is_text(one):
            content += one + b"\0"
    if len(content) < NUM_PIECES:
        raise ValueError(f"{root} holds {len(content)} bytes of text; name a folder that has more")
    pieces = torch.frombuffer(content, dtype=torch.uint8).tensor_split(NUM_PIECES)
    held_out = pieces[HELD_OUT_SHARE // 2 :: HELD_OUT_SHARE]
    train = [
        piece
        for number, piece in enumerate(pieces)
        if number % HELD_OUT_SHARE != HELD_OUT_SHARE // 2
    ]
    return torch.cat(train), torch.cat(held_out)


def _is_text(content: bytes) -> bool:
    try:
        return bool(content.decode()) and b"\0" not in content
    except UnicodeDecodeError:
        return False
