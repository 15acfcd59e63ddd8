"""A small GPT on the bytes of any text; by default the source of Python's standard library."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import ClassVar, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossipdp.parallel.schedule import parameter_groups
from gossipdp.tasks.options import BytesGptOptions
from gossipdp.tasks.workload import BatchLoader, Workload, evaluating, worker_seed

NUM_BYTES = 256
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.95)

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
"""Directories left out wherever they lie: test packages, and what is not the library itself."""

HELD_OUT_SHARE = 20
"""One file in this many is held out for validation, chosen by the hash of its relative path."""

NUM_PIECES = 200
"""Of a text of few files, every twentieth of so many equal pieces is held out instead."""


class Gpt(Workload[Tensor]):
    """The next byte of a text; validation in bits per byte, lower is better.

    text: read once and kept in memory.
    context: bytes of a window; width, depth, heads: of the transformer.
    learning_rate: peak rate of AdamW.
    num_validation_windows: how many windows, evenly spaced over the held-out text, are evaluated.

    Batches: (batch, context + 1), int64; the last byte of a window is the next one's first.
    """

    metric_name = "validation_bits_per_byte"
    higher_is_better = False
    default_batch_size: ClassVar[int] = 16

    def __init__(
        self,
        text: Text,
        *,
        disjoint: bool = False,
        batch_size: int | None = None,
        device: str = "cpu",
        context: int = 256,
        width: int = 256,
        depth: int = 4,
        heads: int = 8,
        learning_rate: float = 1e-3,
        num_validation_windows: int = 4096,
    ) -> None:
        super().__init__(disjoint=disjoint, batch_size=batch_size, device=device)
        self.text = text
        self.context = context
        self._shape = (width, depth, heads)
        self._learning_rate = learning_rate
        self._num_validation_windows = num_validation_windows
        self._num_samples = max(0, len(text.train()) - 1) // context
        if self.num_samples < self.batch_size:
            raise ValueError(
                f"the text: {self.num_samples} training samples are less than one batch of "
                f"{self.batch_size}; choose a smaller --batch-size"
            )
        if len(text.validation()) <= context:
            raise ValueError(
                f"{len(text.validation())} bytes are held out, less than one window of "
                f"--context {context}; give more text or a smaller --context"
            )

    @classmethod
    def of(cls, options: BytesGptOptions) -> Self:
        """As ``gossipdp train bytes-gpt`` trains it."""
        return cls(
            read_text(options.data),
            batch_size=options.batch_size,
            device=options.device,
            context=options.context,
            width=options.width,
            depth=options.depth,
            heads=options.heads,
            learning_rate=options.learning_rate,
        )

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def make_model(self) -> nn.Module:
        width, depth, heads = self._shape
        model = ByteTransformer(width=width, depth=depth, num_heads=heads, context=self.context)
        return model.to(self.device)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(model, WEIGHT_DECAY)
        return torch.optim.AdamW(groups, lr=self._learning_rate, betas=BETAS)

    def train_loader(self, rank: int, num_workers: int, seed: int) -> BatchLoader[Tensor]:
        shuffle = worker_seed(rank, num_workers, seed)
        tokens = self.text.train(self.text.shares(num_workers)[rank] if self.disjoint else None)
        # Windows overlap by one byte: the last target of one is the first input of the next.
        starts = torch.arange(0, len(tokens) - self.context, self.context)
        offsets = torch.arange(self.context + 1)
        return BatchLoader(
            starts,
            batch_size=self.batch_size,
            seed=shuffle,
            gather=lambda chosen: tokens[chosen.unsqueeze(1) + offsets].long().to(self.device),
        )

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats."""
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.reshape(-1, NUM_BYTES), batch[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> float:
        """Mean cross-entropy in bits per byte over fixed, evenly spaced held-out windows."""
        tokens = self.text.validation()
        last_start = len(tokens) - self.context - 1
        num_windows = min(self._num_validation_windows, last_start // self.context + 1)
        starts = torch.linspace(0, last_start, num_windows).long()
        nats = 0.0
        with evaluating(model):
            for chosen in torch.split(starts, 32):
                windows = tokens[chosen.unsqueeze(1) + torch.arange(self.context + 1)].long()
                nats += float(self.loss(model, windows.to(self.device))) * len(chosen)
        return nats / num_windows / math.log(2)


@final
class PyStdlib(Gpt):
    """The smaller network of the demo, on the source of the running Python's standard library.

    The text is real, large enough not to be memorised in a demo (about 10 MB), and on every
    machine that runs Python. With ``disjoint`` the workers get different top-level packages and
    modules, of about equal size, so their data is not identically distributed.

    root: the directory of the text; None takes the standard library of the running Python.

    >>> stdlib = PyStdlib()
    >>> next(iter(stdlib.train_loader(rank=0, num_workers=4, seed=0))).shape
    torch.Size([8, 129])
    """

    default_batch_size = 8

    def __init__(
        self,
        *,
        disjoint: bool = False,
        batch_size: int | None = None,
        root: Path | None = None,
    ) -> None:
        super().__init__(
            read_python(root or Path(sysconfig.get_path("stdlib"))),
            disjoint=disjoint,
            batch_size=batch_size,
            context=128,
            width=128,
            depth=2,
            heads=4,
            learning_rate=3e-3,
            num_validation_windows=256,
        )


@final
class ByteTransformer(nn.Module):
    """Bytes of shape (batch, length) to logits of the next byte, (batch, length, 256).

    Decoder-only; the output layer shares its weight with the embedding: one parameter under two
    names.
    """

    def __init__(self, *, width: int, depth: int, num_heads: int, context: int) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width {width} is not a multiple of num_heads {num_heads}")
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(depth)))
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


# Text.


@dataclass(frozen=True)
class TextFile:
    """One file: its path relative to the root, and its bytes."""

    path: PurePosixPath
    content: bytes

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(str(self.path).encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


class Text:
    """Files one after the other by path, a zero byte after each; some are held out."""

    def __init__(self, root: Path, files: tuple[TextFile, ...]) -> None:
        self.root = root
        self.files = files

    def validation(self) -> Tensor:
        """The held-out files; 1-D, uint8."""
        return _join(file for file in self.files if file.held_out)

    def train(self, packages: Iterable[str] | None = None) -> Tensor:
        """The training files of these top-level packages and modules, or of all; 1-D, uint8."""
        chosen = None if packages is None else frozenset(packages)
        return _join(
            file
            for file in self.files
            if not file.held_out and (chosen is None or file.path.parts[0] in chosen)
        )

    def shares(self, num_workers: int) -> list[tuple[str, ...]]:
        """Disjoint top-level packages and modules for each worker, of about equal size.

        The largest goes first, each to the worker that has least so far.
        """
        num_bytes: dict[str, int] = defaultdict(int)
        for file in self.files:
            if not file.held_out:
                num_bytes[file.path.parts[0]] += len(file.content)
        if len(num_bytes) < num_workers:
            raise ValueError(
                f"{self.root} has {len(num_bytes)} top-level packages and modules, too few to "
                f"give {num_workers} workers disjoint ones; use fewer workers"
            )
        shares: list[list[str]] = [[] for _ in range(num_workers)]
        sizes = [0] * num_workers
        for package in sorted(num_bytes, key=lambda package: (-num_bytes[package], package)):
            smallest = min(range(num_workers), key=lambda rank: (sizes[rank], rank))
            shares[smallest].append(package)
            sizes[smallest] += num_bytes[package]
        return [tuple(share) for share in shares]


@final
class PiecesOfText(Text):
    """A text of any folder: of 200 equal pieces every twentieth is held out."""

    def __init__(self, root: Path, files: tuple[TextFile, ...]) -> None:
        super().__init__(root, files)
        held_out = HELD_OUT_SHARE // 2
        kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
        for number, piece in enumerate(_join(files).tensor_split(NUM_PIECES)):
            kinds[number % HELD_OUT_SHARE == held_out].append(piece)
        self._train, self._validation = torch.cat(kinds[0]), torch.cat(kinds[1])

    def validation(self) -> Tensor:
        """See :class:`Text`."""
        return self._validation

    def train(self, packages: Iterable[str] | None = None) -> Tensor:
        """See :class:`Text`; it is not shared out by packages."""
        assert packages is None
        return self._train


@cache
def read_python(root: Path) -> Text:
    """Read every ``*.py`` under root except what ``LEFT_OUT`` names; once per process."""
    paths: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        # Pruned before they are entered: site-packages alone can be larger than the library.
        subdirectories[:] = [name for name in subdirectories if name not in LEFT_OUT]
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    files = tuple(
        TextFile(PurePosixPath(path.relative_to(root).as_posix()), path.read_bytes())
        for path in sorted(paths)
    )
    if not any(file.held_out for file in files) or all(file.held_out for file in files):
        raise ValueError(
            f"{root} holds {len(files)} Python source files, too few to train on some and hold "
            "others out; name a directory with more (Debian: apt install libpython3-stdlib)"
        )
    return Text(root, files)


def read_text(path: Path | None) -> Text:
    """The text of a folder and all folders in it, or of one file; None: of the standard library.

    A file is text if it is UTF-8 without zero bytes; others are passed over, and so is what lies in
    hidden folders.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: there is no text, or too little to train on some and hold others out.
    """
    if path is None:
        return read_python(Path(sysconfig.get_path("stdlib")))
    if not path.exists():
        raise FileNotFoundError(f"there is no {path.absolute()}; name a folder of text with --data")
    root = path.parent if path.is_file() else path
    paths = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    files = []
    for each in paths:
        relative = PurePosixPath(each.relative_to(root).as_posix())
        if each != path and any(part[0] == "." for part in relative.parts):
            continue
        content = each.read_bytes()
        if _is_text(content):
            files.append(TextFile(relative, content))
    num_bytes = sum(len(file.content) + 1 for file in files)
    if num_bytes < NUM_PIECES:
        raise ValueError(f"{path} holds {num_bytes} bytes of text; name a folder that has more")
    return PiecesOfText(root, tuple(files))


def _is_text(content: bytes) -> bool:
    if not content or b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _join(files: Iterable[TextFile]) -> Tensor:
    content = bytearray()
    for file in files:
        content += file.content
        content.append(0)
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
