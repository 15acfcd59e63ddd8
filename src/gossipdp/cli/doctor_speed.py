"""How fast memory and links are, measured for ``gossipdp doctor`` with the library's own parts."""

from __future__ import annotations

import multiprocessing
import secrets
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from gossipdp.cli.doctor_findings import Check, Finding

if TYPE_CHECKING:
    from gossipdp.cli.doctor_link import LinkSpeed
    from gossipdp.runtime.tcp import SharedMemory

SLOW_MEMORY = 2e9
"""Bytes per second that a copy reads and writes: less, and exchanges are felt by training."""

SLOW_LOOPBACK = 0.3e9
SLOW_ROUND_TRIP_S = 2e-3
"""On one machine; more means that the cores are busy with other things."""

SLOW_LINK = 12.5e6
"""Between machines: 100 Mbit/s."""

FAR_ROUND_TRIP_S = 20e-3

NUM_PARAMETERS = 4_000_000
NUM_RUNS = 3
ROUND_S = 0.15
"""How long a round of the local links is to take: they are fast."""


def checks() -> list[Check]:
    """All checks of this file, in the order in which they are shown."""
    return [
        ("memory speed", _look_at_memory),
        ("local link", lambda: judge_local("local link", measure_here("off"))),
        ("shared link", lambda: judge_local("shared link", measure_here("auto"))),
    ]


def judge_memory_speed(copy: float, update_ms: float, kernels: str, num_parameters: int) -> Finding:
    """How fast one core copies memory, and computes an exchange.

    Args:
        copy: bytes read and written per second.
        update_ms: an exchange's arithmetic on so many float32 parameters.
        kernels: what computed it.
        num_parameters: how many.
    """
    figures = {"copy_gb_per_s": copy / 1e9, "update_ms": update_ms, "parameters": num_parameters}
    found = (
        f"copies {copy / 1e9:.1f} GB/s; an exchange of {num_parameters / 1e6:g}M parameters "
        f"computes {update_ms:.1f} ms ({kernels})"
    )
    if copy < SLOW_MEMORY:
        advice = "see who else uses the machine, then measure with gossipdp bench update"
        return Finding("memory speed", "warn", found, advice, figures)
    return Finding("memory speed", "ok", found, figures=figures)


def judge_local(name: str, speed: LinkSpeed) -> Finding:
    """A link between two processes of this machine."""
    found, figures = show(speed), figures_of(speed)
    if speed.both < SLOW_LOOPBACK or speed.round_trip_s > SLOW_ROUND_TRIP_S:
        advice = "see who else uses the cores, then measure with gossipdp bench exchange"
        return Finding(name, "warn", found, advice, figures)
    return Finding(name, "ok", found, figures=figures)


def judge_link(speed: LinkSpeed) -> Finding:
    """A link to another machine."""
    found, figures = show(speed), figures_of(speed)
    mbits = max(1, round(speed.both * 8e-6))
    latency_ms = max(0.01, speed.round_trip_s * 500)
    advice = (
        f"what it allows: gossipdp plan --workers N --parameters 25M --step-ms 100 "
        f"--link-mbps {mbits} --latency-ms {latency_ms:.2g}"
    )
    slow = speed.both < SLOW_LINK or speed.round_trip_s > FAR_ROUND_TRIP_S
    return Finding("link", "warn" if slow else "ok", found, advice, figures)


def show(speed: LinkSpeed) -> str:
    """A measured link in words."""
    return (
        f"{_rate(speed.there)} there, {_rate(speed.back)} back, {_rate(speed.both)} each way "
        f"at once; round trip {_duration(speed.round_trip_s)}"
    )


def figures_of(speed: LinkSpeed) -> dict[str, float]:
    """A measured link for ``--json``."""
    return {
        "round_trip_us": speed.round_trip_s * 1e6,
        "there_mb_per_s": speed.there / 1e6,
        "back_mb_per_s": speed.back / 1e6,
        "both_mb_per_s": speed.both / 1e6,
    }


def measure_here(shared_memory: SharedMemory) -> LinkSpeed:
    """Measure a link between this process and a new one, over loopback.

    Raises:
        RuntimeError: The other process did not start.
        RendezvousError: It does not answer.
    """
    from gossipdp.cli import doctor_link

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    secret = secrets.token_bytes(16)
    process = context.Process(target=_serve_here, args=(theirs, secret, shared_memory), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(20.0):
            raise RuntimeError("a second process did not start within 20 s")
        return doctor_link.measure(
            ours.recv(), "127.0.0.1", secret, shared_memory=shared_memory, lasts_s=ROUND_S
        )
    finally:
        ours.close()  # which ends it
        process.join(2.0)
        process.kill()
        process.join()


def _serve_here(pipe: Connection, secret: bytes, shared_memory: SharedMemory) -> None:
    from gossipdp.cli import doctor_link
    from gossipdp.runtime.tcp_sockets import listen

    listener = listen("127.0.0.1", 0)
    pipe.send(listener.getsockname())
    doctor_link.serve(
        listener,
        "127.0.0.1",
        secret,
        shared_memory=shared_memory,
        goes_on=lambda: not pipe.poll(),  # its end is news too
    )


def _look_at_memory() -> Finding:
    from gossipdp.cli.bench_update_runs import UpdateRuns

    runs = UpdateRuns(NUM_PARAMETERS, "float32")
    medians = {row.name: row.median_ms for row in runs.measure(NUM_RUNS)}
    copy_ms = min(value for name, value in medians.items() if name.startswith("copy"))
    return judge_memory_speed(
        runs.copied_bytes / copy_ms * 1e3,
        medians[f"{runs.kernels}: as in an exchange"],
        runs.kernels,
        NUM_PARAMETERS,
    )


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:.3g} MB/s"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
