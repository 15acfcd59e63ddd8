"""What is refused where it is said: a ValueError that names the value and what to say instead."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from gossipdp import Checkpoints, GossipDataParallel, Monitor, Network, ProgressLR


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1)


def wrap(net: nn.Module | None = None, optimizer: Any = None, **arguments: Any) -> None:
    """Whatever is refused opens nothing that this would have to close."""
    net = nn.Linear(2, 1) if net is None else net
    GossipDataParallel(net, sgd(net) if optimizer is None else optimizer, **arguments)


def schedule(shape: Any, **arguments: Any) -> None:
    ProgressLR(sgd(nn.Linear(2, 1)), lambda: 0.0, shape, **arguments)


def tied_through_data() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight.data = net[0].weight.data
    return net


def pieces_of_one_tensor(overlap: int) -> nn.Module:
    """Two parameters that share so many values, among buffers that share more."""
    memory, net = torch.zeros(20), nn.Module()
    net.first = nn.Parameter(memory[:10])
    net.second = nn.Parameter(memory[10 - overlap : 20 - overlap])
    table = torch.zeros(10)
    net.register_buffer("constants", table)
    net.register_buffer("some_of_them", table[2:4])
    return net


def with_a_view_of_its_weight() -> nn.Module:
    net = nn.Linear(2, 2)
    net.register_buffer("turned", net.weight.detach().T, persistent=False)
    return net


def with_a_buffer(dtype: torch.dtype) -> nn.Module:
    net = nn.Linear(2, 2)
    net.register_buffer("phases", torch.zeros(2, dtype=dtype))
    return net


NET, OTHER = nn.Linear(3, 2), nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wrap(graph="rings"), "do you mean ring"),
        (lambda: wrap(comm_rate=0.0), r"comm_rate must be a positive number, not 0\.0"),
        (lambda: wrap(comm_rate=math.nan), "comm_rate must be a positive number, not nan"),
        (lambda: wrap(comm_rate="often"), "comm_rate must be a positive number, not 'often'"),
        (lambda: wrap(method="magic"), "a2cid2, gossip, allreduce, none"),
        (lambda: wrap(pace="brisk"), "free, strict"),
        (lambda: wrap(neighbour_policy="rude"), "fresh"),
        (lambda: wrap(wire_format="float8"), "full, bfloat16, lattice8"),
        (lambda: wrap(wire_format="bfloat16", method="allreduce"), "of the exchanges of gossip"),
        (lambda: wrap(budget_samples=0), "budget_samples"),
        (lambda: wrap(budget_samples=1234.5), "budget_samples must be a whole number, not 1234.5"),
        (lambda: wrap(samples_per_step=0), "samples_per_step"),
        (lambda: wrap(samples_per_step="8"), "samples_per_step must be a whole number, not '8'"),
        (lambda: wrap(seed=1.5), "seed must be a whole number, not 1.5"),
        (lambda: wrap(network={"port": 4000}), r"give gossipdp\.Network"),
        (
            lambda: wrap(network=Network(max_bytes_per_s=1e6), method="allreduce"),
            "caps the links of gossip",
        ),
        (lambda: wrap(optimizer="sgd"), r"torch\.optim"),
        (lambda: wrap(optimizer=[]), "at least one"),
        (lambda: wrap(NET, sgd(OTHER)), "not part of the module"),
        (lambda: wrap(NET, [sgd(NET), sgd(NET)]), "same parameter"),
        (lambda: wrap(nn.Linear(3, 2, dtype=torch.complex64)), "real view"),
        (lambda: wrap(nn.Linear(3, 2, device="meta")), "on meta.*CPU before wrapping"),
        (lambda: wrap(tied_through_data()), r"'0\.weight' and '1\.weight' lie in the same memory"),
        (lambda: wrap(pieces_of_one_tensor(1)), "'first' and 'second' lie in the same memory"),
        (lambda: wrap(with_a_view_of_its_weight()), "'weight' and 'turned' lie|'turned' and 'wei"),
        (lambda: wrap(nn.Linear(2, 1).share_memory()), "'weight' lies in memory that processes"),
        (
            lambda: wrap(with_a_buffer(torch.complex128), checkpoints=Checkpoints("d")),
            r"'phases' is torch.complex128, which checkpoints cannot hold",
        ),
        (lambda: Monitor(status_port=65536), r"status_port must be in 0\.\.65535, not 65536"),
        (lambda: Checkpoints(every_steps=0, directory="d"), "every_steps must be at least 1"),
        (lambda: Checkpoints(keep=0), "keep must be at least 1"),
        (lambda: Checkpoints(keep=None), "keep must be a whole number"),
        (lambda: Checkpoints(every_steps=3), "need a directory"),
        (lambda: Checkpoints(resume="auto"), "need a directory"),
        (lambda: Checkpoints(resume=True), "resume is 'auto', a directory or None, not True"),
        (lambda: schedule("cosinus"), "unknown shape 'cosinus'"),
        (lambda: schedule({1.5: 0.1}), r"the progress of a step is a share in 0\.\.1, not 1\.5"),
        (lambda: schedule("cosine", warmup=2.0), r"warmup is a share in 0\.\.1, not 2\.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_pieces_of_one_tensor_and_views_of_constants_are_no_mistake(tmp_path: Any) -> None:
    for net in (pieces_of_one_tensor(0), with_a_buffer(torch.complex64)):
        GossipDataParallel(net, sgd(net), checkpoints=Checkpoints(tmp_path)).close()
    net = with_a_buffer(torch.complex128)
    GossipDataParallel(net, sgd(net)).close()
