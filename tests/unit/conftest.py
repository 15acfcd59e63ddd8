"""Fixtures of unit tests: a world of workers' transports, open descriptors, a fake card."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_card import FakeCard, fake_card
from links import World


@pytest.fixture
def world(run_tls: Path) -> Iterator[World]:
    world = World(run_tls)
    yield world
    for node in list(world.nodes):
        world.close(node)


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
