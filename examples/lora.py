"""Adapters (LoRA) beside a large frozen base, trained by unequal machines over home lines.

    python examples/lora.py base.pt --make          once: a base of 105 million values, some minutes
    gossipdp run -n 3 examples/lora.py base.pt      fine-tune; writes adapters.pt, one megabyte

The base has learned the source text of Python's standard library, byte by byte; its adapters learn
the prose of Python's manual. Only they are exchanged and saved: the base stays as it was loaded, so
copy the same file to each machine. docs/lora.md measures this with three machines, each behind 20
Mbit/s.
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from gossipdp import GossipDataParallel, ProgressLR

CONTEXT, WIDTH, HEADS, DEPTH, RANK, ROWS = 64, 256, 4, 4, 16, 400_000
LEARNING_RATE = 0.016


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Maps bytes of shape (batch, time) to logits of the next byte, (batch, time, 256).

    A small transformer with a large table: each place also reads the rows of the two, three and
    four bytes that end there. So the base is large, and a step still fits a processor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.rows = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.byte(text) + self.place(torch.arange(text.shape[1]))
        code = text
        for before in (1, 2, 3):
            code = 257 * code + F.pad(text, (before, 0))[:, : text.shape[1]] + 1
            x = x + self.rows(code * 2_654_435_761 % 2**32 % ROWS)
        return self.head(self.norm(self.blocks(x)))


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a trained product of two thin matrices."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def adapted(base: Path) -> Model:
    """Return the base, frozen, with adapters beside all linear layers of its blocks.

    The file is mapped, not read: workers of one machine hold it once.
    """
    with torch.device("meta"):
        net = Model()
    net.load_state_dict(torch.load(base, mmap=True, weights_only=True), assign=True)
    net.requires_grad_(False)
    for block in net.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    return net


def loss_of(net: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(net(windows[:, :-1]).transpose(1, 2), windows[:, 1:])


def prose() -> tuple[Tensor, Tensor]:
    """Return the manual, and the start of each window of its last tenth, which nobody trains on."""
    text = "".join(topics[name] for name in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return text, torch.arange(len(text) * 9 // 10, len(text) - CONTEXT, CONTEXT)


def make_base(path: Path, steps: int) -> None:
    """Train all weights on the source text, alone, and write them."""
    source = b"".join(each.read_bytes() for each in sorted(Path(os.__file__).parent.glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    net = Model()
    dense = [each for name, each in net.named_parameters() if name != "rows.weight"]
    optimizers = torch.optim.AdamW(dense, lr=1e-3), torch.optim.SparseAdam([net.rows.weight], 2e-3)
    for _ in track(range(steps), f"training {path}"):
        loss = loss_of(net, text, torch.randint(len(text) - CONTEXT, (32,)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    new = path.with_suffix(f".{os.getpid()}")  # so that the file is there whole or not at all
    torch.save(net.state_dict(), new)
    new.replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path, help="the file of the base")
    parser.add_argument("--make", action="store_true", help="make it")
    parser.add_argument("--steps", type=int, default=400, help="of making it")
    parser.add_argument("--samples", type=int, default=6_000, help="of all workers together")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.make:
        make_base(options.base, options.steps)
    elif not options.base.exists():
        parser.error(f"there is no {options.base}; --make makes it")
    else:
        net = adapted(options.base)
        text, held_out = prose()
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
        model = GossipDataParallel(net, optimizer, budget_samples=options.samples)
        schedule = ProgressLR(optimizer, model, "one_cycle")
        with torch.no_grad():
            before = loss_of(net, text, held_out).item()
        order = torch.Generator().manual_seed(model.worker_seed)
        most = int(held_out[0]) - CONTEXT
        batches = [torch.randint(most, (8,), generator=order) for _ in range(1000)]
        for starts in model.batches(batches):
            optimizer.zero_grad()
            loss_of(net, text, starts).backward()
            optimizer.step()
            schedule.step()
        exchanges = model.stats().exchanges
        model.consolidate()
        with torch.no_grad():
            after = loss_of(net, text, held_out).item()
        if model.is_lead:
            model.save_averaged("adapters.pt", base=False)
            total = sum(parameter.numel() for parameter in net.parameters())
            print(f"{total:,} values, {sum(each.numel() for each in trained):,} of them trained")
            print(f"{exchanges} exchanges; {before:.3f} nats a byte before, {after:.3f} after")
