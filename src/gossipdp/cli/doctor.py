"""``gossipdp doctor``: what works on this machine, and what to set.

Of most things one function asks the machine, and one, which the tests give facts to, judges.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

import gossipdp
from gossipdp.errors import GossipError

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
LAST_PYTHON = (3, 13)
"""The last version of CPython that gossipdp is tested with."""

PROBE_BYTES = 1 << 20
ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Kept for documentation (RFC 5737, RFC 3849), so on no network: where default routes lead."""

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class DoctorArguments:
    """Check what works on this machine, and say what to set."""

    json: Path | None = None
    """Also write the findings to this file."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    verdict: ``warn``: it works, but slower or with less than there could be; ``fail``: training
    does not work here before this is mended. advice: one sentence; empty: there is nothing to do.
    figures: numbers and names for programs that read ``--json``.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


Check = tuple[str, Callable[[], Finding | None]]
"""The name of what is looked at, and what looks; None: there is nothing to say of it here."""


def run(arguments: DoctorArguments) -> int:
    """Look, show what was found and write the file; 1 if anything failed."""
    console = Console()
    with Console(stderr=True).status("looking") as status:
        findings = examine(machine_checks(), lambda name: status.update(f"looking at: {name}"))
    console.print(table_of(findings))
    failed = [finding.name for finding in findings if finding.verdict == "fail"]
    warned = [finding.name for finding in findings if finding.verdict == "warn"]
    summary = "training works here"
    if failed:
        summary = f"training does not work here before this is mended: {', '.join(failed)}"
    elif warned:
        summary += f"; see what is said of: {', '.join(warned)}"
    console.print(summary, highlight=False)
    if arguments.json is not None:
        report = {
            "ok": not failed,
            "version": gossipdp.__version__,
            "findings": [asdict(finding) for finding in findings],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        console.print(f"results: {arguments.json}", highlight=False, soft_wrap=True, markup=False)
    return 1 if failed else 0


def examine(checks: Sequence[Check], begins: Callable[[str], None]) -> list[Finding]:
    """Look at one thing after the other; ``begins`` is called with the name of each before.

    One that cannot be looked at keeps none from its turn.
    """
    findings = []
    for name, look in checks:
        begins(name)
        try:
            finding = look()
        except Exception as error:  # whatever is broken here is what the user came to learn
            found = f"trying it ended with {type(error).__name__}: {error}"
            advice = "mend what the message names, and run gossipdp doctor again"
            finding = Finding(name, "fail", found, advice)
        if finding is not None:
            findings.append(finding)
    return findings


def table_of(findings: Sequence[Finding]) -> Table:
    """The findings, advice under what it is about."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style="" if finding.verdict == "ok" else "bold")
        verdict = Text(finding.verdict, style=COLOURS[finding.verdict])
        table.add_row(verdict, finding.name, text)
    return table


def machine_checks() -> list[Check]:
    """What is looked at, in the order in which it is shown."""
    torch = importlib.metadata.version("torch")
    python: Check = ("Python", lambda: judge_python(sys.version_info[:3], sys.platform, torch))
    if sys.platform == "win32":  # the others ask the kernel what Windows does not know
        return [python]
    return [
        python,
        ("kernels", _look_at_kernels),
        ("TLS", _look_at_tls),
        ("GPU", _look_at_gpu),
        ("cores", _look_at_cores),
        ("shared memory", _look_at_shared_memory),
        ("address", _look_at_address),
    ]


def judge_python(version: tuple[int, ...], platform: str, torch: str) -> Finding:
    """The interpreter and the system; ``platform`` is ``sys.platform``."""
    shown = ".".join(map(str, version))
    found = f"{shown} on {platform}, torch {torch}"
    figures = {"version": shown, "platform": platform, "torch": torch}
    if platform == "win32":
        advice = "train under Linux or WSL; here only gossipdp plan and simulate are meant to work"
        return Finding("Python", "fail", found, advice, figures)
    if platform != "linux":
        advice = "train on Linux: nothing else was tested"
        return Finding("Python", "warn", found, advice, figures)
    if version[:2] > LAST_PYTHON:
        advice = f"take Python {'.'.join(map(str, LAST_PYTHON))}: this one was not tested"
        return Finding("Python", "warn", found, advice, figures)
    return Finding("Python", "ok", found, figures=figures)


def _look_at_kernels() -> Finding:
    """The code that computes the exchanges of large models, made as training would."""
    import torch

    from gossipdp.dynamics.update import LEAST_COMPILED_VALUES, choose_kernels, compile_loops

    version = importlib.metadata.version("numba")
    figures: dict[str, object] = {"numba": version}
    try:
        chosen = choose_kernels(LEAST_COMPILED_VALUES)
    except ValueError as error:
        return Finding("kernels", "fail", str(error), "unset GOSSIPDP_KERNELS")
    figures["chosen"] = chosen
    if chosen != "numba":
        found = f"{chosen}, with numba {version} at hand"
        return Finding("kernels", "warn", found, "unset GOSSIPDP_KERNELS", figures)
    started_s = time.perf_counter()
    try:
        compile_loops(torch.float32, torch.float32)
    except ImportError as error:
        found = f"numba {version} cannot be imported: {error}"
        advice = "pip install --force-reinstall numba, or set GOSSIPDP_KERNELS=torch"
        return Finding("kernels", "fail", found, advice, figures)
    figures["ready_s"] = ready_s = time.perf_counter() - started_s
    found = f"compiled by numba {version}, ready in {ready_s:.1f} s"
    return Finding("kernels", "ok", found, figures=figures)


def _look_at_tls() -> Finding | None:
    from gossipdp.launcher.environment import tls_from
    from gossipdp.links.tls import Tls

    try:
        files = tls_from(os.environ)
        if files is None:
            return None
        Tls(files)
    except ValueError as error:
        return Finding("TLS", "fail", str(error), "mend or unset the GOSSIPDP_TLS_ variables")
    return Finding("TLS", "ok", "your certificate and key fit")


def _look_at_gpu() -> Finding | None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return judge_gpu([torch.cuda.get_device_name(index) for index in range(count)])


def judge_gpu(devices: Iterable[str]) -> Finding | None:
    """The GPUs that torch sees."""
    from gossipdp.dynamics.device import ON, SWITCH

    names = list(devices)
    if not names:
        return None
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    advice = (
        "keep the parameters on the CPU: exchanges of those on a GPU have never run on a card, "
        f"and {SWITCH}={ON} alone allows them"
    )
    return Finding("GPU", "warn", found, advice, {"devices": names})


def _look_at_cores() -> Finding:
    from gossipdp.launcher.local import available_cores

    return judge_cores(len(available_cores()), cgroup_cores(), os.getloadavg()[0])


def judge_cores(num_cores: int, cgroup: float | None, load: float) -> Finding:
    """Cores that this process may run on, the container's limit on their time, and the load."""
    figures = {"cores": num_cores, "cgroup_cores": cgroup, "load": load}
    found = f"{num_cores}, load {load:.1f}"
    if cgroup is not None and cgroup < num_cores:
        threads = max(1, int(cgroup))
        found += f"; the container may use {cgroup:.3g} of them"
        advice = (
            f"start at most {threads} workers with OMP_NUM_THREADS=1, or set it so that "
            f"workers x threads is at most {threads}: more are stopped again and again"
        )
        return Finding("cores", "warn", found, advice, figures)
    if load > num_cores:
        advice = "wait, or start fewer workers: others use the cores too"
        return Finding("cores", "warn", found, advice, figures)
    return Finding("cores", "ok", found, figures=figures)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that the control group of a container may use; None for no limit."""
    try:
        quota, _, period = (root / "cpu.max").read_text().strip().partition(" ")
    except OSError:
        return None
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _look_at_shared_memory() -> Finding:
    """Do what two workers do: make memory, pass its descriptor, map it and read it in place."""
    from gossipdp.links.shared_memory import SharedSegment, map_peers_segment

    try:
        own = SharedSegment(PROBE_BYTES, 1)
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with here, there:
            socket.send_fds(here, [b"?"], [own.descriptor])
            _, descriptors, _, _ = socket.recv_fds(there, 1, 1)
        try:
            view = map_peers_segment(descriptors[0], PROBE_BYTES)
        finally:
            os.close(descriptors[0])
        own.memory[-4:] = b"read"
        if bytes(view[-4:]) != b"read":
            raise OSError("what one process wrote, the other does not see")
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: no memfd_create
        advice = (
            "workers of this host use TCP instead, about 3 times slower; it needs Linux 5.1 "
            "and a container that allows memfd_create"
        )
        return Finding("shared memory", "warn", str(error), advice, {"works": False})
    found = "memfd, sealed, passed and read in place"
    return Finding("shared memory", "ok", found, figures={"works": True})


def _look_at_address() -> Finding:
    """Where a worker started here, with this environment, would listen, and whether it can."""
    from gossipdp.launcher.environment import Environment
    from gossipdp.links.sockets import listen

    nodes = os.environ.get("SLURM_JOB_NUM_NODES") or "1"
    num_nodes = int(nodes) if nodes.isdigit() else 1
    store_host = os.environ.get("MASTER_ADDR") or None
    host = os.environ.get("GOSSIPDP_HOST") or None
    port = os.environ.get("GOSSIPDP_PORT") or "0"
    try:
        if not (port.isascii() and port.isdigit() and int(port) < 65536):
            raise ValueError(f"GOSSIPDP_PORT is {port!r}; it must be a port from 1 to 65535")
        chosen = Environment(store_host=store_host, host=host).choose_host()
        listen(chosen, int(port)).close()
    except (GossipError, ValueError) as error:
        advice = "correct GOSSIPDP_HOST, GOSSIPDP_PORT or MASTER_ADDR"
        return Finding("address", "fail", str(error), advice)
    where = f"{chosen}, ports from {port} on" if int(port) else f"{chosen}, any free port"
    return judge_address(where, chosen, bool(store_host or host), outward_address(), num_nodes)


def judge_address(
    where: str, chosen: str, is_given: bool, outward: str | None, num_nodes: int
) -> Finding:
    """The address on which a worker would listen, ``where`` with its ports in words.

    ``is_given``: by GOSSIPDP_HOST or MASTER_ADDR. ``outward``: the address from which other
    machines are reached. ``num_nodes``: machines of the run, as far as the environment says.
    """
    from gossipdp.launcher.environment import show_address

    figures = {"chosen": chosen, "outward": outward}
    if num_nodes > 1 and ipaddress.ip_address(chosen).is_loopback:
        advice = f"set GOSSIPDP_HOST to {outward or 'an address that the others reach'}"
        found = f"{chosen}, which the other {num_nodes - 1} machines do not reach"
        return Finding("address", "warn", found, advice, figures)
    found, advice = f"workers listen on {where}", ""
    if not is_given and outward is not None:
        found += " (the default: one machine)"
        advice = (
            f"for several machines: --nnodes and --rendezvous {show_address(outward, 29400)} on "
            "all, if this is the first; behind a firewall fix the ports with GOSSIPDP_PORT"
        )
    return Finding("address", "ok", found, advice, figures)


def outward_address() -> str | None:
    """The address from which other machines are reached, IPv4 before IPv6; None: there is none."""
    from gossipdp.launcher import environment

    for target in ANYWHERE:
        with suppress(OSError):
            return environment.routed_address(target)
    return None
