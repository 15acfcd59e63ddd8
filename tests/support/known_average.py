"""What the workers of a real run bring to its average, to compare the average with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from waiting import wait_until

from gossipdp import GossipDataParallel
from gossipdp.links.clock import since_boot_s
from gossipdp.protocol.pairing import Idle


def quietly(model: GossipDataParallel, meet: Callable[[str], None], look: Callable[[], Any]) -> Any:
    """Return what ``look`` finds while no worker exchanges; none trains meanwhile.

    ``meet`` waits for all workers that live, once for each word. Each worker first makes the
    exchanges that are due: if a proposal is withdrawn, the peer may have begun it, and it fails.
    """
    engine: Any = model._engine
    thread, loop, protocol = engine._thread, engine._loop, engine._protocol
    meet("trained")  # until then the others may need this one's exchanges

    def has_made_all() -> bool:
        pairing, is_due = protocol.pairing, protocol.clock.next_tick_at(loop.clock()) is not None
        return isinstance(pairing.state, Idle) and not (
            pairing.available and (is_due or pairing.backlog)
        )

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
    for chunk in averaged_chunks(model):
        room = torch.empty(chunk.num_elements, dtype=chunk.pending.dtype)
        chunk.read_z(room)
        values.append(room)
    return torch.cat([each.double() for each in values])


def x_of(model: GossipDataParallel) -> Tensor:
    """Return the values that the module holds, in the order of :func:`z_of`."""
    return torch.cat([chunk.x for chunk in averaged_chunks(model)])


def averaged_chunks(model: GossipDataParallel) -> Any:
    engine: Any = model._engine
    return engine._state.averaged_chunks


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


def phase_and_starts(model: GossipDataParallel) -> tuple[float, float, list[float]]:
    """Return the phase, the time at which it was so, and when all exchanges so far began."""
    engine: Any = model._engine
    now_s = since_boot_s()
    stats = model.stats()
    assert stats.exchanges == len(stats.recent_exchanges)
    starts = [exchange.started_s for exchange in stats.recent_exchanges]
    return engine._startup.phase.at(now_s), now_s, starts


def phase_by_hand(eta: float, now_s: float, starts: list[float]) -> float:
    """Return the phase of a worker of rate 1 whose exchanges began at ``starts`` (concepts.md)."""
    theta, mean_gap_s = 0.0, np.nan
    for number, (start_s, next_s) in enumerate(
        zip(starts, [*starts[1:], now_s], strict=True), start=0
    ):
        if number > 0:
            gap_s = start_s - starts[number - 1]
            if number == 1:
                mean_gap_s = gap_s
            else:
                mean_gap_s += max(0.1, 1 / number) * (min(gap_s, 10 * mean_gap_s) - mean_gap_s)
            theta += eta * min((next_s - start_s) / mean_gap_s, 4.0)
    return theta
