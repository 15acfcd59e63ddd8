r"""The arithmetic of the dynamics: every change of x, c and pending, in one place.

Each event is one function. It works in place on one-dimensional tensors of one length: ``x`` (the
parameters), ``pending`` (the next boundary adds it to x; float32 if x has 2 bytes a value) and
``c`` (the momentum as an exchange last wrote it, None under plain averaging). Flow decays the
momentum, :math:`c(\theta) = e^{-2(\theta - \theta_c)}\,c` with :math:`\theta_c` the phase at which
c was written, but only an exchange writes it. So a flow from :math:`\theta_1` to :math:`\theta_2`
is one multiply and add. With
:math:`q = \tfrac12(e^{-2(\theta_1-\theta_c)} - e^{-2(\theta_2-\theta_c)})` → ``share`` (0 where
there is nothing to flow), :math:`s = e^{-2(\theta_2-\theta_c)}` → ``left`` and
:math:`\tilde\alpha` → ``alpha_tilde``:

.. math::
    \text{flow}:\quad & p \leftarrow p + q\,c \\
    \text{snapshot} &= x + p + q\,c \\
    \text{exchange}:\quad & \delta = \text{mine} - \text{peers}, \quad
        \text{flow}, \quad p \leftarrow p - \tfrac12\delta, \quad
        c \leftarrow s\,c - (\tilde\alpha - \tfrac12)\,\delta, \quad \theta_c \leftarrow \theta_2 \\
    \text{boundary}:\quad & \text{flow}, \quad x \leftarrow x + p, \quad p \leftarrow 0

An event is computed by torch, in several passes, or by a loop that numba compiles, in one
(``compiled=True``: :mod:`~gossipdp.dynamics.update_loops`, for parameters and snapshots of
:data:`COMPILED_DTYPES` in host memory). One test suite holds both to these promises:

* delta is the difference of the two snapshots, rounded once. So the other end has its exact
  negative, whatever it computes with.
* It is applied whole or not at all: if any of its values is NaN or infinite, nothing is written.
  This depends on delta alone, so both ends decide alike.
* Nothing is allocated after the first call, except by :func:`carry_on`, which serves buffers alone.
  The interpreter's lock is free during a pass.
"""

# ruff: noqa: PLR0917 (tensors and numbers in the order of the equations)

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import call

import torch
from torch import Tensor

from gossipdp.dynamics import machine_code
from gossipdp.dynamics.machine_code import loop

KERNELS = ("numba", "torch")

COMPILED_DTYPES = (torch.float32, torch.bfloat16)
"""Precisions of parameters and snapshots that compiled loops know, in host memory."""

MOST_AT_ONCE = 1 << 24
"""Values of one pass that needs scratch."""

LEAST_COMPILED_VALUES = 1_000_000
"""With fewer values to exchange, loading compiled loops costs more time than they ever save."""


# The events.


def at_once(*operations: Callable[[], object]) -> None:
    """Do all of these or none, whatever a signal's handler raises meanwhile.

    They are C functions (torch's, numba's and others), called by one: handlers run before and after
    it, never between two of them.
    """
    deque(map(call, operations), maxlen=0)


def flow(values: Tensor, c: Tensor, share: float) -> None:
    """Flow: values += share c, where values are pending or x itself."""
    values.add_(c, alpha=share)


def boundary_operations(
    x: Tensor,
    pending: Tensor,
    c: Tensor | None,
    share: float,
    *,
    has_pending: bool,
    compiled: bool,
) -> list[Callable[[], object]]:
    """Return the boundary, for :func:`at_once`: flow, then x += pending.

    The rounding remainder stays in pending.
    """
    if not has_pending and c is not None and x.dtype == pending.dtype:
        # Pending is zero, so this pass leaves out half of the memory.
        return [
            loop("flow").operation(x, c, share) if compiled else partial(x.add_, c, alpha=share)
        ]
    flows = c is not None and share != 0.0
    if compiled:
        return [loop("boundary", x.dtype).operation(x, pending, _or(c, pending), flows, share)]
    operations: list[Callable[[], object]] = []
    if c is not None and flows:
        operations.append(partial(pending.add_, c, alpha=share))
    if x.dtype == pending.dtype:
        operations += [partial(x.add_, pending), pending.zero_]
    else:
        operations += [partial(pending.add_, x), partial(x.copy_, pending)]
        operations.append(partial(pending.sub_, x))
    return operations


def take_operations(x: Tensor, taken: Tensor) -> list[Callable[[], object]]:
    """Return the boundary of an inbox, for :func:`at_once`: x += taken.

    x is written first, and whole: who reads both meanwhile finds what was taken twice at worst, and
    never x in place of it. The rounding remainder stays in taken.
    """
    if x.dtype == taken.dtype:
        return [partial(x.add_, taken), taken.zero_]
    operations: list[Callable[[], object]] = []
    parts = (torch.split(values, MOST_AT_ONCE) for values in (x, taken))
    for part, rest in zip(*parts, strict=True):
        room = scratch(rest)
        operations.append(partial(torch.add, rest, part, out=room))
        operations += [partial(part.copy_, room), partial(torch.sub, room, part, out=rest)]
    return operations


def read(out: Tensor, x: Tensor, pending: Tensor, c: Tensor | None, share: float) -> None:
    """Write x + pending as they will be after the flow, which the next event does itself."""
    if c is not None and share != 0.0:
        pending = torch.add(pending, c, alpha=share, out=scratch(pending))
    torch.add(x, pending, out=out)


def snapshot(
    out: Tensor,
    x: Tensor,
    pending: Tensor,
    c: Tensor | None,
    share: float,
    *,
    compiled: bool,
) -> bool | Tensor:
    """Do the same, and look for NaN and infinity.

    Returns:
        True if all is finite; or the total that :func:`is_finite` takes.
    """
    if compiled:
        flows = c is not None and share != 0.0
        each = loop("snapshot", x.dtype, out.dtype)
        return each(out, x, pending, _or(c, pending), flows, share) == 0.0
    read(out, x, pending, c, share)
    return out.sum(dtype=torch.float32)


def exchange(
    pending: Tensor,
    c: Tensor | None,
    mine: Tensor,
    peers: Tensor,
    share: float,
    left: float,
    alpha_tilde: float,
    *,
    compiled: bool = False,
) -> float:
    """Flow, then apply delta = mine - peers; return its squared norm.

    If the norm is not finite, delta was not, and nothing was written.
    """
    if compiled:
        momentum, numbers = (_or(c, pending), c is not None), (share, left, alpha_tilde)
        return loop("exchange", wire=mine.dtype)(pending, *momentum, mine, peers, *numbers)
    delta = scratch(pending)
    squared_norm = difference(delta, mine, peers)
    if not math.isfinite(squared_norm):
        # Finite values beyond 1e19 are no poison: only their squares exceed float32.
        wide = delta.double()
        squared_norm = float(torch.dot(wide, wide))
        if not math.isfinite(squared_norm):
            return squared_norm
    if c is not None and share != 0.0:
        flow(pending, c, share)
    pending.add_(delta, alpha=-0.5)
    if c is not None:
        c.mul_(left).add_(delta, alpha=0.5 - alpha_tilde)
    return squared_norm


def exchange_coded(
    pending: Tensor, c: Tensor | None, coded: tuple[Tensor, Tensor, Tensor], *numbers: float
) -> float:
    """Do the same with delta in whole numbers (int8), and the exponents of their steps; compiled.

    The third tensor takes the largest delta of each block.
    """
    return loop("exchange_coded")(pending, _or(c, pending), c is not None, *coded, *numbers)


def carry_on(values: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """Return ``values`` with what has changed meanwhile: values + (now - before).

    If ``values`` and ``now`` have the same sign, the result keeps it, with half of the smaller one
    at least: a running variance stays positive, however much it has shrunk meanwhile. This limit
    matters only if the change is more than half of ``values``, with the other sign.

    Example:
        >>> values, before = torch.tensor([3.0, 0.5]), torch.tensor([4.0, 1.0])
        >>> carry_on(values, before, now=torch.tensor([4.5, 0.25]))
        tensor([3.5000, 0.1250])
    """
    least = torch.minimum(values, now).mul_(0.5)
    most = torch.maximum(values, now).mul_(0.5)
    least.masked_fill_(least < 0.0, -math.inf)
    most.masked_fill_(most > 0.0, math.inf)
    return (values + (now - before)).clamp_(least, most)


def difference(out: Tensor, mine: Tensor, peers: Tensor) -> float:
    """Write mine - peers, exactly negated at the other end; return its squared norm."""
    if mine.dtype == out.dtype:
        torch.sub(mine, peers, out=out)
    else:
        out.copy_(mine)
        out.sub_(peers)
    return float(torch.dot(out, out))


def is_finite(values: Tensor, total: Tensor | float | None = None) -> bool:
    """Return True if no value is NaN or infinite: one sum, and a closer look if it overflows."""
    total = values.sum(dtype=torch.float32) if total is None else total
    return math.isfinite(float(total)) or bool(torch.isfinite(values).all())


class _Kept(threading.local):
    def __init__(self) -> None:
        self.rooms: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


_kept = _Kept()


def scratch(like: Tensor, number: int = 0) -> Tensor:
    """Return the calling thread's room ``number`` for values ``like`` these; keep it."""
    key = number, like.dtype, like.device
    room = _kept.rooms.get(key)
    if room is None or room.numel() < like.numel():
        with torch.inference_mode(False):  # what is made in that mode may not be written later
            room = _kept.rooms[key] = torch.empty_like(like)
    return room[: like.numel()]


# What computes.


def choose_kernels(num_values: int, requested: str | None = None) -> str:
    """Choose ``numba`` or ``torch`` for exchanges of so many values.

    ``auto`` takes numba for at least :data:`LEAST_COMPILED_VALUES`; ``numba`` and ``torch`` are
    taken as they are. By default the variable GOSSIPDP_KERNELS decides, else ``auto``.
    """
    requested = requested or os.environ.get("GOSSIPDP_KERNELS") or "auto"
    if requested not in ("auto", *KERNELS):
        raise ValueError(
            f"GOSSIPDP_KERNELS is {requested!r}; choose one of auto, {', '.join(KERNELS)}"
        )
    if requested == "auto":
        return "numba" if num_values >= LEAST_COMPILED_VALUES else "torch"
    return requested


def compile_loops(x: torch.dtype, wire: torch.dtype) -> None:
    """Compile the loops for parameters and snapshots of these precisions, or load them from disk.

    So no later call is slow. For the errors see :func:`~gossipdp.dynamics.machine_code.loop`.
    """
    for name in machine_code.ARGUMENTS.keys() - machine_code.CODED:
        loop(name, x, wire)


def _or(values: Tensor | None, instead: Tensor) -> Tensor:
    return instead if values is None else values
