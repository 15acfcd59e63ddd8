"""Fixtures shared by all tests."""

import datetime
import functools
import gc
import itertools
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import exploring
import hypothesis
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from listed_skips import ListedSkips, names_of, read_list
from run_processes import path_before

from gossipdp import logs
from gossipdp.launcher.local import launch, start_fork_server
from gossipdp.links.tls import make_tls_files

TESTS = Path(__file__).parent
LONG = {name for name, _ in read_list((TESTS / "long.txt").read_text())}
# What a launcher around the tests, or their user's shell, may have set.
SET_OUTSIDE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "GOSSIPDP_LOG")
SET_OUTSIDE += ("GOSSIPDP_SECRET", "GOSSIPDP_STATUS_PORT", "GOSSIPDP_STATUS_HOST")
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("explore", print_blob=True, deadline=None)
hypothesis.settings.load_profile("fixed" if exploring.SEED is None else "explore")
Workers = Callable[..., list[Any]]


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis draw from the seed that the header shows; let only listed tests be skipped."""
    for name in SET_OUTSIDE:
        os.environ.pop(name, None)
    config.pluginmanager.register(ListedSkips(TESTS / "skips.txt"))
    if exploring.SEED is not None:
        config.option.hypothesis_seed = str(exploring.SEED)


def pytest_report_header() -> str:
    """Say which examples are drawn."""
    if exploring.SEED is None:
        return "examples: the fixed set (GOSSIPDP_EXPLORE=1 draws others)"
    return f"examples: GOSSIPDP_EXPLORE={exploring.SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of ``long.txt``."""
    if names_of(item.nodeid) & LONG:
        item.add_marker("long")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files that start processes evenly over the first four fifths of the others.

    The processes of ``make test`` take one file after the other. So while one of them mostly
    waits for workers, another mostly computes, and at the end, where one would wait for the
    other, there are the short files of single units.
    """
    starts = {item.path for item in items if item.get_closest_marker("processes")}
    paths = sorted({item.path for item in items}, key=lambda path: (len(path.parts), path))
    places: dict[Path, float] = {}
    for some, share in ((starts, 0.8), (set(paths) - starts, 1.0)):
        ordered = [path for path in paths if path in some]
        places |= {path: share * number / len(some) for number, path in enumerate(ordered)}
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server before any test can; settle threads and signals for all tests.

    A process has only one fork server: made by a test that wants another preload, it would let
    every worker of the session import torch again, seconds of CPU time each. The tensors of tests
    are small, and on a busy machine torch's threads spin while they wait for each other. What a
    shell runs in the background, with all that it starts, would ignore Ctrl+C.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported stays: no collection need look at its million objects again
    if session.config.option.collectonly:
        return
    if any(item.get_closest_marker("processes") for item in session.items):
        start_fork_server(also=["gossipdp_lab.simulate.study"])


def with_warnings_as_errors(function: Callable[..., Any], *args: Any) -> Any:
    """Call it in a worker with warnings as errors, as the tests themselves are run."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
    return function(*args)


def pytest_runtest_teardown() -> None:
    """Leave no handler of ours behind: it would write to the standard error of the test before."""
    logger = logging.getLogger("gossipdp")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    logs._handler = logs._is_lead = None
    os.environ.pop("GOSSIPDP_LOG", None)  # as main() sets it for workers


@pytest.fixture(scope="session")
def workers() -> Workers:
    """``workers(function, n, args=(), timeout_s=200)``: results of ``n`` real worker processes.

    They are forked from a server that imports torch once a session. A test that uses it carries
    the mark ``processes``.
    """

    def call(
        function: Callable[..., Any],
        n: int,
        args: Sequence[Any] = (),
        timeout_s: float = 200,
        **options: Any,
    ) -> list[Any]:
        # No import path leads to test modules, so they travel by value.
        module = sys.modules[function.__module__]
        if TESTS in Path(getattr(module, "__file__", "/")).parents:
            cloudpickle.register_pickle_by_value(module)
        call = functools.partial(with_warnings_as_errors, function)
        return launch(call, n, args, timeout_s=timeout_s, **options)

    return call


class Authority:
    """A certificate authority whose certificates are files for the tests."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory / name
        self._directory.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._numbers = itertools.count()
        self.ca = self._write(
            "ca.pem",
            self._sign(self._name, self._key, -1, 365, authority=True).public_bytes(
                serialization.Encoding.PEM
            ),
        )

    def issue(self, first_day: float = -1, last_day: float = 365) -> Path:
        """Return a new worker's files; its certificate is valid between two days from now."""
        number = next(self._numbers)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"worker {number}")])
        certificate = self._sign(name, key, first_day, last_day)
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        (self._directory / str(number)).mkdir()
        self._write(f"{number}/cert.pem", certificate.public_bytes(pem))
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        self._write(f"{number}/key.pem", private)
        self._write(f"{number}/ca.pem", self.ca.read_bytes())
        return self._directory / str(number)

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        first_day: float,
        last_day: float,
        *,
        authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=first_day))
            .not_valid_after(now + datetime.timedelta(days=last_day))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, data: bytes) -> Path:
        path = self._directory / name
        path.write_bytes(data)
        path.chmod(0o600)
        return path


@pytest.fixture(scope="session")
def new_authority(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Authority]:
    """``new_authority(name)``: another authority."""
    directory = tmp_path_factory.mktemp("certificates")
    return lambda name: Authority(directory, name)


@pytest.fixture(scope="session")
def authority(new_authority: Callable[[str], Authority]) -> Authority:
    """Make the authority of the run under test."""
    return new_authority("the run's authority")


@pytest.fixture(scope="session")
def run_tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the one certificate of a run, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    make_tls_files(directory)
    return directory


# For scripts that use no store: the supervisor's takes no seconds to import torch, which it could
# not where it may open no file.
NO_TORCH = """
class TCPStore:
    def __init__(self, *values, **options):
        pass
"""


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Variables with which a process finds an empty torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "distributed.py").write_text(NO_TORCH)
    return path_before(tmp_path)
