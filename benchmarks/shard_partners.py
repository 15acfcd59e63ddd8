"""Do the shards of a replica exchange with one partner, or each with its own?

    python benchmarks/shard_partners.py [--quick]

Simulated: replicas in synchronous rounds, each a gradient step and then one exchange of every
replica with a neighbour, by a random perfect matching of the graph. The parameters are cut into
shards. "agreed": all shards exchange by one matching. "alone": each shard by a matching of its own,
so that the parts of a replica come from different partners. Measured are the decay of the consensus
distance per exchange without gradients, and the loss of the mean model on digits that nobody
trained on, over all seeds. Plain averaging; the data are common to all replicas.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import networkx as nx
import numpy as np
import torch
from sklearn.datasets import load_digits
from support.report import Report, Spread, Table, run_script
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

NUM_REPLICAS, NUM_SHARDS, BATCH = 16, 4, 16
RATES = (0.004, 0.008)


def matchings(name: str) -> list[np.ndarray]:
    """Return some perfect matchings of a graph: each as the partner of every replica."""
    n = NUM_REPLICAS
    if name == "ring":
        rounds = [[(i, (i + 1) % n) for i in range(first, n, 2)] for first in (0, 1)]
    else:  # complete: the rounds of a tournament
        rounds = []
        for turn in range(n - 1):
            others = [(turn + i) % (n - 1) for i in range(n - 1)]
            pairs = [(n - 1, others[0])]
            pairs += [(others[i], others[-i]) for i in range(1, n // 2)]
            rounds.append(pairs)
    found = []
    for pairs in rounds:
        assert nx.is_perfect_matching(nx.complete_graph(n), set(map(tuple, pairs)))
        partner = np.empty(n, dtype=np.int64)
        for one, other in pairs:
            partner[one], partner[other] = other, one
        found.append(partner)
    return found


class Exchanges:
    """Averages rows of (replicas, values) with their partners' at every call."""

    def __init__(self, graph: str, num_values: int, seed: int, *, agreed: bool) -> None:
        self._matchings = [torch.from_numpy(each) for each in matchings(graph)]
        self._random = np.random.default_rng(seed)
        self._agreed = agreed
        self._shards = torch.arange(num_values).chunk(NUM_SHARDS)

    def __call__(self, x: Tensor) -> None:
        drawn = self._random.integers(len(self._matchings), size=NUM_SHARDS)
        for number, shard in enumerate(self._shards):
            partner = self._matchings[drawn[0 if self._agreed else number]]
            part = x[:, shard]
            x[:, shard] = 0.5 * (part + part[partner])


def decay(graph: str, seed: int, *, agreed: bool) -> float:
    """Decay of the consensus distance per exchange."""
    x = torch.randn(NUM_REPLICAS, 4096, generator=torch.Generator().manual_seed(seed)).double()
    exchange, rounds = Exchanges(graph, 4096, seed, agreed=agreed), 40

    def distance() -> float:
        return float((x - x.mean(0)).square().sum())

    first = distance()
    for _ in range(rounds):
        exchange(x)
    return float(np.log(first / distance()) / rounds)


def final_loss(graph: str, seed: int, rate: float, num_steps: int, *, agreed: bool) -> float:
    """Loss of the mean model on held-out digits after training with AdamW."""
    digits = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    shapes = {name: each.shape for name, each in net.named_parameters()}
    start = torch.cat([each.detach().flatten() for each in net.parameters()])

    def loss(flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        named = {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        return nn.functional.cross_entropy(functional_call(net, named, (inputs,)), targets)

    x = nn.Parameter(start.repeat(NUM_REPLICAS, 1))
    optimizer = torch.optim.AdamW([x], lr=rate)
    gradients = vmap(grad(loss))
    exchange = Exchanges(graph, x.shape[1], seed, agreed=agreed)
    data = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        chosen = torch.randint(1437, (NUM_REPLICAS, BATCH), generator=data)
        x.grad = gradients(x.detach(), images[chosen], labels[chosen])
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + np.cos(np.pi * step / num_steps))
        optimizer.step()
        with torch.no_grad():
            exchange(x)
    with torch.no_grad():
        return float(loss(x.mean(0), images[1437:], labels[1437:]))


def main() -> None:
    """Run all rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("shard_partners", __doc__.split("\n", 1)[0], options.quick)
    seeds = range(2 if options.quick else 4)
    num_steps = 30 if options.quick else 200
    rates = RATES[:1] if options.quick else RATES
    rows = []
    for graph in ("ring", "complete"):
        for agreed in (True, False):
            losses = {
                rate: [final_loss(graph, seed, rate, num_steps, agreed=agreed) for seed in seeds]
                for rate in rates
            }
            best = min(losses, key=lambda rate: fmean(losses[rate]))
            row = {
                "graph": graph,
                "partners": "agreed" if agreed else "alone",
                "decay": [decay(graph, seed, agreed=agreed) for seed in seeds],
                "rate": best,
                "losses": losses[best],
                "mean_loss_by_rate": {str(rate): fmean(each) for rate, each in losses.items()},
            }
            rows.append(row)
            print(row, flush=True)
    cells = [
        (
            f"{row['graph']}, {row['partners']}",
            Spread.of(row["decay"]).text(".3f"),
            f"{row['rate']:g}",
            Spread.of(row["losses"]).text(".4f"),
        )
        for row in rows
    ]
    head = ("graph, partners", "decay per exchange", "learning rate", "held-out loss")
    note = (
        f"{NUM_REPLICAS} replicas of {NUM_SHARDS} shards, {num_steps} steps of batch {BATCH}, "
        f"AdamW, best of {len(rates)} rates; median and range over {len(seeds)} seeds."
    )
    report.tables.append(Table("Partners of shards", head, cells, note))
    report.write(rows)


if __name__ == "__main__":
    run_script(main)
