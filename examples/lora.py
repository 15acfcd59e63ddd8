"""The bytes of an exchange if all weights are trained, or adapters of low rank (LoRA) alone.

    gossipdp run -n 2 examples/lora.py

A small transformer first learns the source text of Python's standard library, byte by byte. It is
then fine-tuned on the prose of Python's manual, once with all weights and once with adapters beside
its frozen linear layers.
"""

import argparse
import copy
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossipdp import Exchange, GossipDataParallel, Network

CONTEXT, WIDTH, HEADS, DEPTH, RANK = 64, 128, 4, 4, 4


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
    """Maps bytes of shape (batch, time) to logits of the next byte, (batch, time, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1])
        return self.head(self.norm(self.blocks(self.byte(text) + self.place(places))))


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a trained product of two thin matrices."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def adapted(net: Model) -> Model:
    net = copy.deepcopy(net).requires_grad_(False)
    for block in net.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    return net


def loss_of(net: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(net(windows[:, :-1]).transpose(1, 2), windows[:, 1:])


def train(name: str, net: Model, text: Tensor, samples: int, lr: float) -> float:
    """Train on nine tenths of the text, print the loss on the rest; return an exchange's bytes."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    model = GossipDataParallel(
        net,
        optimizer,
        budget_samples=samples,
        exchange=Exchange(pace="strict"),  # wait for exchanges: there are to be some
        network=Network(shared_memory="off"),  # through sockets, where bytes are counted
    )
    start = model.stats().bytes_sent  # all weights were sent once
    generator = torch.Generator().manual_seed(model.worker_seed)
    end = len(text) * 9 // 10
    rest = torch.arange(end, len(text) - CONTEXT - 1, 2048)
    with torch.no_grad():
        before = loss_of(net, text, rest).item()
    batches = [torch.randint(end - CONTEXT, (16,), generator=generator) for _ in range(1000)]
    for starts in model.batches(batches):
        optimizer.zero_grad()
        loss_of(net, text, starts).backward()
        optimizer.step()
    stats = model.stats()
    model.consolidate()
    with torch.no_grad():
        after = loss_of(net, text, rest).item()
    sent = (stats.bytes_sent - start) / max(stats.exchanges, 1)
    if model.is_lead:
        size = sum(parameter.numel() for parameter in trained)
        losses = f"loss {before:.2f} to {after:.2f}"
        print(f"{name:<12} {size:>7,} trained {sent:>9,.0f} bytes an exchange  {losses}")
    return sent


parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=4000, help="of each of the three trainings")
samples = parser.parse_args().samples

library = sorted(Path(argparse.__file__).parent.glob("*.py"))
source = b"".join(path.read_bytes() for path in library)
prose = "".join(topics[name] for name in sorted(topics)).encode()
source, prose = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (source, prose))

net = Model()
train("from scratch", net, source, samples, lr=2e-3)
whole = train("all weights", copy.deepcopy(net), prose, samples, lr=5e-4)
thin = train("adapters", adapted(net), prose, samples, lr=5e-3)
