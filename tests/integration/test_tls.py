import logging
import os
from pathlib import Path

import pytest
from small_run import SmallRun
from waiting import wait_until

from gossipdp import GossipDataParallel, Network
from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.environment import read_addresses
from gossipdp.launcher.launch_plan import ask_join_infos
from gossipdp.links import tls
from gossipdp.links.tls import Tls, TlsStream, make_tls_files

pytestmark = pytest.mark.processes


def are_secured(model: GossipDataParallel) -> list[bool]:
    links = list(model._worker._loop.transport.links.values())
    streams = [link.stream for link in links]
    return [isinstance(it, TlsStream) and it.connection.version() == "TLSv1.3" for it in streams]


def train_while_keys_are_renewed() -> tuple[int, list[list[float]]]:
    """Return how many keys were renewed, and the parameters at the end."""
    tls.MAX_RECORDS = 300
    said: list[str] = []
    logging.getLogger("gossipdp").addFilter(lambda record: said.append(record.getMessage()))
    logging.getLogger("gossipdp").setLevel("INFO")
    network = Network(start_timeout_s=60, shared_memory="off")  # TLS is given by the environment
    run = SmallRun(0.0, graph="complete", comm_rate=1, network=network)

    def ended() -> list[str]:
        # One end closes and says why. The other finds the end by reading, by writing or as a reset.
        return [text for text in said if ": link to worker" in text]

    wait_until(
        lambda: run.model.stats().exchanges >= 300 and len(ended()) >= 3,
        lambda: f"300 exchanges and 3 ends of links: {run.model.stats().exchanges}, {ended()}",
        run.step,
    )
    assert all(are_secured(run.model))
    assert "lost" not in run.noticed()
    assert run.model.consolidate().world_size == 2
    num_renewed = sum("its TLS key" in text for text in ended())
    return num_renewed, [value.tolist() for value in run.net.parameters()]


def test_under_an_own_authority_training_goes_on_while_links_get_new_keys(workers, authority):
    tls = {"GOSSIPDP_TLS": str(authority.issue())}
    (one, end), (other, its_end) = workers(train_while_keys_are_renewed, 2, environment=tls)
    assert end == its_end
    assert one + other >= 3


def join_over_tls(directory: Path, files: Path, stranger: Path) -> list[list[float]]:
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
    run = SmallRun(network=Network(start_timeout_s=60, tls=files))
    model = run.model
    if run.rank == 0:
        port = model._worker._loop.transport.identity.port
        address.with_suffix(".new").write_text(f"127.0.0.1:{port}")
        address.with_suffix(".new").rename(address)
    if not joins:
        wait_until(lambda: "joined" in run.noticed(), "one joins", run.step)
    wanted = model.stats().exchanges + 3

    # Each links to the joiner when it has the graph with it, which is soon and not at once.
    def is_linked() -> bool:
        return model.stats().exchanges >= wanted and len(are_secured(model)) == 2

    wait_until(is_linked, "three exchanges, with both others linked", run.step)
    assert are_secured(model) == [True, True]
    assert model.consolidate().world_size == 3
    return [value.tolist() for value in run.net.parameters()]


def test_a_worker_joins_a_run_over_tls(workers, run_tls, tmp_path):
    stranger = tmp_path / "another run"
    make_tls_files(stranger)
    first, *others = workers(join_over_tls, 3, args=(tmp_path, run_tls, stranger))
    assert others == [first, first], "the same bits on all"
