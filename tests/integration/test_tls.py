"""TLS in whole runs: ``gossipdp run --tls-...`` and the arguments of ``GossipDataParallel``."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gossipdp import GossipDataParallel
from gossipdp.cli.main import main

SCRIPT = """
import torch
from gossipdp import GossipDataParallel
from gossipdp.runtime.tls import TlsStream

torch.manual_seed(0)
net = torch.nn.Linear(50, 20)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = GossipDataParallel(net, optimizer, graph="complete", start_timeout_s=60)
for _ in range(200):
    optimizer.zero_grad()
    model(torch.randn(8, 50)).square().mean().backward()
    optimizer.step()
links = list(model._engine._loop.transport.links.values())
secured = all(isinstance(link.stream, TlsStream) and link.stream.is_secured for link in links)
result = model.consolidate()
total = sum(parameter.double().sum().item() for parameter in net.parameters())
print(f"links {len(links) > 0} secured {secured} workers {result.num_workers} total {total!r}")
"""

VARIABLES = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("GOSSIPDP_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE"))
}


def options(files: Any) -> list[str]:
    return ["--tls-cert", f"{files.cert}", "--tls-key", f"{files.key}", "--tls-ca", f"{files.ca}"]


@pytest.mark.processes
def test_a_run_over_tls(authority: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["run", "-n", "2", *options(authority.issue()), str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "gossipdp.cli.main", *words],
        capture_output=True,
        text=True,
        env=VARIABLES,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = {line.partition("] ")[2] for line in done.stdout.splitlines()}
    assert len(ends) == 1, ends  # the same bits on all
    assert next(iter(ends)).startswith("links True secured True workers 2 total ")


def test_one_clear_error_before_any_worker_starts(
    authority: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    good, other = authority.issue(), authority.issue()
    bad = [
        ("--tls-cert", [*options(good)[:2]], "give tls_key (--tls-key, GOSSIPDP_TLS_KEY)"),
        ("missing", options(dataclasses.replace(good, ca=tmp_path / "none")), "cannot read tls_ca"),
        ("another key", options(dataclasses.replace(good, key=other.key)), "the key is not that"),
        ("expired", options(authority.issue(-9, -1)), "has expired"),
    ]
    for _, words, message in bad:
        assert main(["run", "-n", "2", *words, str(script)]) == 2
        shown = capsys.readouterr()
        assert message in shown.err
        assert len(shown.err.strip().splitlines()) == 1
        assert "started" not in shown.out


def wrap(**arguments: Any) -> GossipDataParallel:
    net = torch.nn.Linear(2, 2)
    return GossipDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1), **arguments)


def test_the_arguments_are_checked_when_a_module_is_wrapped(authority: Any) -> None:
    files = authority.issue()
    with pytest.raises(ValueError, match=r"give tls_ca \(--tls-ca, GOSSIPDP_TLS_CA\)"):
        wrap(tls_cert=files.cert, tls_key=files.key)
    expired = authority.issue(-9, -1)
    with pytest.raises(ValueError, match="has expired"):
        wrap(tls_cert=expired.cert, tls_key=str(expired.key), tls_ca=expired.ca)
    wrap(tls_cert=files.cert, tls_key=str(files.key), tls_ca=files.ca).close()


def test_all_reduce_is_not_passed_off_as_protected(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue()
    with pytest.raises(ValueError, match="would send everything in the clear"):
        wrap(method="allreduce", tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
    for name in ("cert", "key", "ca"):
        monkeypatch.setenv(f"GOSSIPDP_TLS_{name.upper()}", str(getattr(files, name)))
    with pytest.raises(ValueError, match="would send everything in the clear"):
        wrap(method="allreduce")


def refuse_plain(cert: str, key: str, ca: str) -> str:
    """Worker 1 has TLS, worker 0 has none."""
    rank = int(os.environ["RANK"])
    arguments = {"tls_cert": cert, "tls_key": key, "tls_ca": ca} if rank else {}
    try:
        wrap(start_timeout_s=20, **arguments).close()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "wrapped"


@pytest.mark.processes
def test_a_worker_without_tls_among_others(workers: Callable[..., Any], authority: Any) -> None:
    files = authority.issue()
    found = workers(refuse_plain, 2, args=(str(files.cert), str(files.key), str(files.ca)))
    assert any("RefusedError" in text and "TLS is o" in text for text in found), found
