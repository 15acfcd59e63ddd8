"""Fixtures shared by all tests."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from gossipdp.runtime.launcher import launch, start_fork_server

TESTS = Path(__file__).parent
Workers = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def workers() -> Workers:
    """``workers(function, n, args=(), timeout_s=60)``: results of ``n`` real worker processes.

    They are forked from a server that imports torch once a session. A test that uses it carries
    the mark ``processes``.
    """
    start_fork_server()

    def call(
        function: Callable[..., Any],
        n: int,
        args: Sequence[Any] = (),
        timeout_s: float = 60,
        **options: Any,
    ) -> list[Any]:
        # Test modules are on nobody's import path, so they travel by value.
        module = sys.modules[function.__module__]
        if TESTS in Path(getattr(module, "__file__", "/")).parents:
            cloudpickle.register_pickle_by_value(module)
        return launch(function, n, args, timeout_s=timeout_s, **options)

    return call
