"""The verdicts of ``soak.py`` pass what is right; the soak's cuts are cuts."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
import torch
from broken_links import cut, drawn_link
from known_average import errors_in, squared_distance, wrong_average, wrong_end

from gossipdp import Consolidated

INPUTS = {
    rank: {
        "weight": torch.randn(1000, generator=torch.Generator().manual_seed(rank)),
        "count": torch.tensor(rank + 40),
    }
    for rank in (1, 3, 4, 7)
}
MEAN = {
    "weight": torch.stack([state["weight"].double() for state in INPUTS.values()]).mean(0).float(),
    "count": torch.tensor(41),
}
DISTANCE = squared_distance(INPUTS, ["weight"])
END = Consolidated(DISTANCE, world_size=4, samples=640, gradient_steps=40)


def ends(average: dict[str, torch.Tensor], **changes: object) -> list[str]:
    """Return the faults found where worker 4 alone ends so."""
    averages = {rank: average if rank == 4 else MEAN for rank in INPUTS}
    told = {rank: replace(END, **(changes if rank == 4 else {})) for rank in INPUTS}
    return wrong_end(INPUTS, averages, told, ["weight"])


def test_the_mean_in_any_order_of_summing_is_right():
    weights = [state["weight"] for state in INPUTS.values()]
    for order in (weights, weights[::-1]):
        total = torch.zeros(1000)
        for weight in order:
            total += weight
        assert wrong_average(INPUTS, MEAN | {"weight": total / 4}) == []
    assert ends(MEAN) == []


@pytest.mark.parametrize(
    ("average", "changes", "problem"),
    [
        ({"weight": MEAN["weight"] * (1 + 1e-5)}, {}, "other bits than 1 in \\['weight'\\]"),
        ({}, {"world_size": 3}, "worker 4 averaged 3 workers, not 4"),
        ({}, {"samples": 656}, "count unlike samples"),
        ({}, {"consensus_distance": DISTANCE * 1.001}, "worker 4 tells a consensus distance"),
    ],
)
def test_one_that_ends_otherwise_is_told(average, changes, problem):
    (line,) = ends(MEAN | average, **changes)
    assert re.search(problem, line), line


def test_a_mean_of_others_is_wrong():
    of_three = torch.stack([INPUTS[rank]["weight"] for rank in (1, 3, 4)]).mean(0)
    (line,) = wrong_average(INPUTS, MEAN | {"weight": of_three})
    assert line.startswith("weight: 100% are not the mean, by up to ")
    (line,) = wrong_average(INPUTS, MEAN | {"count": torch.tensor(43)})
    assert line == "count is 43, of worker 1 41"
    assert wrong_average(INPUTS, MEAN | {"weight": torch.full((1000,), torch.nan)})


def test_an_error_in_the_output_is_found_but_for_that_of_a_killed_worker_s_loader():
    loaders = [
        "[5] Traceback (most recent call last):",
        '[5]   File ".../multiprocessing/resource_sharer.py", line 138, in _serve',
        "[5] ConnectionResetError: [Errno 104] Connection reset by peer",
    ]
    own = [
        "[5] Traceback (most recent call last):",
        '[5]   File ".../gossipdp/links/tcp.py", line 1, in poll',
        "[5] ConnectionResetError: [Errno 104] Connection reset by peer",
    ]
    assert errors_in(["gossipdp: worker 5 died of signal 9 (SIGKILL)", *loaders]) == []
    assert errors_in([*loaders, *own]) == own[-1:]
    assert errors_in([*own, *loaders, "[1] OSError: Too many open files"]) == [
        own[-1],
        "[1] OSError: Too many open files",
    ]


# Waits for the end of its connection.
PEER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
    peer.recv(1)
"""


def test_both_ends_of_a_link_of_other_processes_see_that_it_is_cut():
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [sys.executable, "-c", PEER, str(server.getsockname()[1])]
        with subprocess.Popen(words) as process, server.accept()[0] as ours:
            link = drawn_link([1, process.pid, os.getpid()], Random(0))
            assert link == (process.pid, os.getpid())
            if not cut(*link):
                process.kill()
                pytest.skip("descriptors cannot be taken")
            ours.settimeout(60)
            assert ours.recv(1) == b""
            assert process.wait(60) == 0
