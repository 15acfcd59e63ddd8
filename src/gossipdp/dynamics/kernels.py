"""The in-place arithmetic of one chunk: what every event of the dynamics does to flat tensors.

All tensors are one-dimensional, of one length, and no function allocates: ``scratch`` is the
caller's. ``x`` may be of lower precision than ``c`` and ``pending``, which then are float32 and
hold what ``x`` cannot.
"""

import torch
from torch import Tensor


def flow_(pending: Tensor, c: Tensor, s: float) -> None:
    r"""Flow by :math:`s = e^{-2\eta\Delta}`: pending += (1 - s)/2 c, then c *= s."""
    pending.add_(c, alpha=0.5 * (1.0 - s))
    c.mul_(s)


def snapshot_(out: Tensor, x: Tensor, pending: Tensor) -> None:
    """Out = x + pending, rounded to ``out``'s precision."""
    torch.add(x, pending, out=out)


def snapshot_flowed_(out: Tensor, x: Tensor, pending: Tensor, c: Tensor) -> None:
    """Out = x + pending + c/2: where the flow ends, whose mean over workers is conserved."""
    torch.add(x, pending, out=out)
    out.add_(c, alpha=0.5)


def difference_(out: Tensor, mine: Tensor, peers: Tensor) -> float:
    """Out = mine - peers, exactly negated at the other end; return its squared norm."""
    out.copy_(mine)
    out.sub_(peers)
    return float(torch.dot(out, out))


def exchange_(pending: Tensor, c: Tensor | None, delta: Tensor, alpha_tilde: float) -> None:
    """Pending -= delta/2 and c -= (alpha_tilde - 1/2) delta."""
    pending.add_(delta, alpha=-0.5)
    if c is not None:
        c.add_(delta, alpha=0.5 - alpha_tilde)


def add_pending_(x: Tensor, pending: Tensor, scratch: Tensor) -> None:
    """X += pending; pending keeps what x's precision cannot hold (nothing, where they agree)."""
    if x.dtype == pending.dtype:
        x.add_(pending)
        pending.zero_()
    else:
        torch.add(x, pending, out=scratch)
        x.copy_(scratch)
        torch.sub(scratch, x, out=pending)


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite: one sum, and a closer look only where it overflows."""
    return bool(torch.isfinite(values.sum(dtype=torch.float32))) or bool(
        torch.isfinite(values).all()
    )
