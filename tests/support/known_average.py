"""Averages whose right result is known: each worker says what it brought to the average.

Exchanges move values between workers, so what a worker brings is known only while none is under
way: :func:`quietly` looks while exchanges are held back.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from waiting import wait_until

from gossipdp import Consolidated, GossipDataParallel
from gossipdp.protocol.pairing import Idle


def quietly(model: GossipDataParallel, meet: Callable[[str], None], look: Callable[[], Any]) -> Any:
    """Return what ``look`` finds while no worker exchanges; ``meet`` waits for all that live."""
    worker: Any = model._worker
    thread, loop, protocol = worker._thread, worker._loop, worker._protocol
    meet("trained")  # until then the others may need this one's exchanges

    def has_made_all() -> bool:
        pairing, is_due = protocol.pairing, protocol.clock.next_tick_at < math.inf
        return isinstance(pairing.state, Idle) and not (
            pairing.available and (is_due or pairing.backlog)
        )

    # If a proposal were withdrawn, the peer might have begun it, and it would fail.
    wait_until(lambda: thread.call(has_made_all).result(), "all exchanges that are due")
    meet("made")  # until then the others may need this one's answers
    thread.call(lambda: loop.perform(protocol.hold(loop.clock()))).result()
    meet("held")  # whatever is under way goes on to its end, and nothing follows it
    wait_until(
        lambda: thread.call(
            lambda: loop._exchange is None and isinstance(protocol.pairing.state, Idle)
        ).result(),
        "what is under way has ended",
    )
    found = look()
    meet("seen")
    thread.call(loop.release).result()
    return found


def z_of(model: GossipDataParallel) -> Tensor:
    """Return z of all that is averaged, in float64: what this worker would bring just now."""
    values = []
    for chunk in model._worker._state.averaged_chunks:
        room = torch.empty(chunk.num_elements, dtype=chunk.pending.dtype)
        chunk.read_z(room)
        values.append(room.double())
    return torch.cat(values)


def x_of(model: GossipDataParallel) -> Tensor:
    """Return the values that the module holds, in the order of :func:`z_of`."""
    return torch.cat([chunk.x for chunk in model._worker._state.averaged_chunks])


def assert_is_mean(average: Tensor, brought: list[Tensor]) -> None:
    """Assert that ``average`` is the rounded mean, whose sums were taken in float32 at least."""
    mean = torch.stack(brought).mean(dim=0)
    if average.dtype == torch.bfloat16:
        # A sum in float32 may end on the other side of a tie; one in bfloat16 is further off.
        last_digit = torch.exp2(torch.frexp(mean).exponent.double() - 8)
        error = (average.double() - mean).abs() / last_digit
        assert error.max() <= 0.51, f"a value is {error.max():.2f} of its last digit off"
        return
    torch.testing.assert_close(average.double(), mean, rtol=1e-6, atol=1e-6)


def consolidate_openly(
    model: GossipDataParallel, directory: Path, num_workers: int
) -> Consolidated:
    """Consolidate with the others; leave what this worker brought, and the average, in files."""

    def meet(word: str) -> None:
        (directory / f"{word}-{model.rank}").touch()
        wait_until(lambda: len(list(directory.glob(f"{word}-*"))) >= num_workers, word)

    brought = quietly(model, meet, lambda: z_of(model))
    torch.save(brought, directory / f"brought-{model.rank}.pt")
    result = model.consolidate()
    torch.save(x_of(model), directory / f"average-{model.rank}.pt")
    return result
