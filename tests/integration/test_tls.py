"""TLS in a whole run, given by the variable of ``gossipdp run --tls`` or as an argument."""

import os
from pathlib import Path

import pytest
import torch
from waiting import pause, wait_until

from gossipdp import GossipDataParallel, Network
from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.environment import read_addresses
from gossipdp.launcher.launch_plan import ask_run_id
from gossipdp.links.tls import Tls, TlsFiles, TlsStream, make_tls_files


def are_secured(model: GossipDataParallel) -> list[bool]:
    """Return whether each link that is up is secured."""
    links = list(model._engine._loop.transport.links.values())
    return [isinstance(link.stream, TlsStream) and link.stream.is_secured for link in links]


def join_over_tls(directory: Path, files: TlsFiles, stranger: TlsFiles) -> str:
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
            ask_run_id(known)
        with pytest.raises(RendezvousError, match="no worker to join answers"):
            ask_run_id(known, Tls(stranger))
        os.environ["GOSSIPDP_RUN_ID"] = ask_run_id(known, Tls(files))
        os.environ["GOSSIPDP_TLS"] = str(files.cert.parent)
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    network = Network(start_timeout_s=60, tls=None if joins else files.cert.parent)
    model = GossipDataParallel(net, optimizer, network=network)
    transport = model._engine._loop.transport
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
    wait_until(
        lambda: model.stats().exchanges >= wanted and len(are_secured(model)) == 2,
        "three exchanges, with both others linked",
        step,
    )
    secured = are_secured(model)
    num_workers = model.consolidate().world_size
    return f"{secured} of {num_workers}: {[value.tolist() for value in net.parameters()]}"


@pytest.mark.processes
def test_a_worker_joins_a_run_over_tls(workers, run_tls, tmp_path):
    stranger = make_tls_files(tmp_path / "another run")
    found = workers(join_over_tls, 3, args=(tmp_path, run_tls, stranger))
    assert len(set(found)) == 1, "the same bits on all"
    assert found[0].startswith("[True, True] of 3: "), found
