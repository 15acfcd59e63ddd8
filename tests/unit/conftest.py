"""Fixtures of unit tests: transports, status servers, open descriptors, a fake card, SIGTERM."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_card import FakeCard, fake_card
from links import World

from gossipdp.observe.server import Page, StatusServer
from gossipdp.parallel.termination import TERMINATION


@pytest.fixture
def world(run_tls: Path) -> Iterator[World]:
    world = World(run_tls)
    yield world
    for node in list(world.nodes):
        world.close(node)


@pytest.fixture
def serve() -> Iterator[Callable[..., StatusServer]]:
    """``serve(pages)``: a status server of these pages, or whose ``/status`` is what is called."""
    servers: list[StatusServer] = []

    def start(pages: Any = lambda: b"{}", host: str = "127.0.0.1", **options: Any) -> StatusServer:
        server = StatusServer(host, 0, **options)
        free = server.server_close
        server.server_close = lambda: time.sleep(0.001) or free()  # close() waits for it
        servers.append(server)
        server.serve({"/status": Page("application/json", pages)} if callable(pages) else pages)
        return server

    yield start
    for server in servers:
        server.close()
        assert server._thread is not None
        assert not server._thread.is_alive()
        StatusServer(*server.address).close()  # the port is free


@pytest.fixture
def open_descriptors() -> Callable[[], set[tuple[str, str]]]:
    """Return a function that lists open sockets and event descriptors, as (number, kind)."""

    def look() -> set[tuple[str, str]]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                continue
            if target.startswith(("socket:", "anon_inode:")):
                found.add((name, target))
        return found

    return look


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    with fake_card(monkeypatch) as card:
        yield card


@pytest.fixture
def plain_sigterm() -> Iterator[None]:
    """Have SIGTERM as it comes, before any model is made and after all are closed."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)
    TERMINATION.failures.clear()
