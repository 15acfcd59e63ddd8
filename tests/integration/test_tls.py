"""TLS in whole runs, given by the variable of ``gossipdp run --tls`` or as an argument."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import pause, wait_until

from gossipdp import GossipDataParallel, Network
from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.environment import read_addresses
from gossipdp.launcher.launch_plan import ask_join_infos
from gossipdp.links import tls
from gossipdp.links.tls import Tls, TlsStream, make_tls_files


def train_while_keys_are_renewed() -> tuple[list[bool], int, int, int, list[Any]]:
    """Return which links are secured, the deaths, workers averaged and new keys, and the end."""
    tls.MAX_RECORDS = 300
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gossipdp").addHandler(handler)
    logging.getLogger("gossipdp").setLevel("INFO")
    net = torch.nn.Linear(50, 20)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    network = Network(start_timeout_s=60, shared_memory="off")  # TLS is given by the environment
    model = GossipDataParallel(net, optimizer, graph="complete", comm_rate=1, network=network)

    def ended() -> list[str]:
        # One end closes and says why. The other finds the end by reading, by writing or as a reset.
        return [text for text in said if ": link to worker" in text]

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 50)).square().mean().backward()
        optimizer.step()

    wait_until(
        lambda: model.stats().exchanges >= 300 and len(ended()) >= 3,
        lambda: f"300 exchanges and 3 ends of links: {model.stats().exchanges}, {ended()}",
        step,
    )
    num_deaths = sum(notice.kind == "lost" for notice in model.stats().noticed)
    secured = are_secured(model)
    num_workers = model.consolidate().world_size
    num_renewed = sum("its TLS key" in text for text in ended())
    return secured, num_deaths, num_workers, num_renewed, [p.tolist() for p in net.parameters()]


def are_secured(model: GossipDataParallel) -> list[bool]:
    links = list(model._worker._loop.transport.links.values())
    return [isinstance(link.stream, TlsStream) and link.stream.is_secured for link in links]


@pytest.mark.processes
def test_under_an_own_authority_training_goes_on_while_links_get_new_keys(workers, authority):
    tls = {"GOSSIPDP_TLS": str(authority.issue())}
    found = workers(train_while_keys_are_renewed, 2, environment=tls)
    for secured, num_deaths, num_workers, _, end in found:
        assert all(secured)
        assert (num_deaths, num_workers) == (0, 2)
        assert end == found[0][-1]
    assert sum(num_renewed for _, _, _, num_renewed, _ in found) >= 3, found


def join_over_tls(directory: Path, files: Path, stranger: Path) -> str:
    """Run as one of three processes: two begin the run, and the last joins it."""
    address = directory / "address"
    joins = os.environ["RANK"] == "2"
    os.environ["WORLD_SIZE"] = "2"
    if joins:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        wait_until(address.exists, "the run has an address")
        os.environ["GOSSIPDP_JOIN"] = address.read_text()
        known = read_addresses("GOSSIPDP_JOIN", address.read_text())
        with pytest.raises(RefusedError, match="TLS is on at the other worker and off here"):
            ask_join_infos(known, 1)
        with pytest.raises(RendezvousError, match="no worker to join answers"):
            ask_join_infos(known, 1, Tls(stranger))
        os.environ["GOSSIPDP_RUN_ID"] = str(ask_join_infos(known, 1, Tls(files))[0].run_id)
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    network = Network(start_timeout_s=60, tls=files)
    model = GossipDataParallel(net, optimizer, network=network)
    transport = model._worker._loop.transport
    if model.rank == 0:
        address.with_suffix(".new").write_text(f"127.0.0.1:{transport.identity.port}")
        address.with_suffix(".new").rename(address)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
        pause()

    if not joins:
        wait_until(lambda: "joined" in [n.kind for n in model.stats().noticed], "one joins", step)
    wanted = model.stats().exchanges + 3

    # Each links to the joiner when it has the graph with it, which is soon and not at once.
    def is_linked() -> bool:
        return model.stats().exchanges >= wanted and len(are_secured(model)) == 2

    wait_until(is_linked, "three exchanges, with both others linked", step)
    secured = are_secured(model)
    num_workers = model.consolidate().world_size
    return f"{secured} of {num_workers}: {[value.tolist() for value in net.parameters()]}"


@pytest.mark.processes
def test_a_worker_joins_a_run_over_tls(workers, run_tls, tmp_path):
    stranger = tmp_path / "another run"
    make_tls_files(stranger)
    found = workers(join_over_tls, 3, args=(tmp_path, run_tls, stranger))
    assert len(set(found)) == 1, "the same bits on all"
    assert found[0].startswith("[True, True] of 3: "), found
