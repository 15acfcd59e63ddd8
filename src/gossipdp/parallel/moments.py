"""The tensors that optimizers keep of each parameter, and those that travel with exchanges.

Adam divides its steps by the root of a running mean of squared gradients, ``exp_avg_sq``. A worker
that sees its own samples only has a poor mean where its gradients are rare. So workers average it,
as they average parameters but seldom: it changes slowly.

The optimizer keeps such a tensor in its own state. After its first step, and whenever a state was
loaded into it, the tensor is replaced by a view of flat memory that holds the same values; the
optimizer, ``state_dict()`` and its readers see no difference. Exchanges average that memory in
chunks (:class:`~gossipdp.dynamics.chunks.MomentChunk`).
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Moment
from gossipdp.dynamics.state import Segment
from gossipdp.parallel.shards import as_sharded, local
from gossipdp.parallel.views import View
from gossipdp.protocol.pairing import MomentsDue

logger = logging.getLogger("gossipdp")

Periods: TypeAlias = Mapping[str, int]
"""By the name of a tensor in the optimizer's state: one exchange in so many carries it."""

# An optimizer that replaces its tensors at every step is given up after so many in a row.
MOST_REPLACED = 3
# The index of the beta that belongs to a tensor, in optimizers that correct the bias.
BETAS = {"exp_avg": 0, "exp_avg_sq": 1}
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
KEEPS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    **dict.fromkeys(_ADAMS, ("exp_avg", "exp_avg_sq")),
    **dict.fromkeys((torch.optim.SGD, torch.optim.Muon), ("momentum_buffer",)),
}
"""The tensors that optimizers keep of each parameter.

They follow from the class, not from an optimizer's state: all workers must decide alike, before any
step too.
"""
DEFAULT_MOMENT = "exp_avg_sq"
"""The one that travels under ``Exchange(moments=True)``; none does under ``amsgrad=True``."""
DEFAULT_PERIOD = 4
"""By default one exchange in so many carries moments, or the first one after ``SHARE_OF_MEMORY``.

16 simulated workers with one exchange a step end 4.4% above all-reduce after 256 steps if v travels
with each exchange (beta_2 = 0.999), 5.6% with every 4th, 8.2% with every 42nd and 8.9% without v;
with four exchanges a step 2.4% if v travels once a step. 0.99 and 0.95 are much the same
(benchmarks/NOTES.md). Every 4th exchange with v adds 25% to the bytes of two workers, 28% to those
of many, as both ends of an exchange count it; each adds 100%.
"""
SHARE_OF_MEMORY = 1 / 4


def _keeps(optimizer: torch.optim.Optimizer) -> tuple[str, ...] | None:
    """Return the names of what an optimizer keeps; None: it is of an unknown kind."""
    return next((names for kind, names in KEEPS.items() if isinstance(optimizer, kind)), None)


def chosen_moments(
    choice: bool | Periods, optimizers: Sequence[torch.optim.Optimizer]
) -> list[Periods]:
    """Return the tensors of each optimizer's state that travel.

    A given name counts for every optimizer that keeps such a tensor, and for every optimizer of an
    unknown kind. By default an optimizer with ``amsgrad=True`` sends none.
    """
    chosen: list[Periods] = []
    if not isinstance(choice, bool):
        known = [_keeps(optimizer) for optimizer in optimizers]
        for name in choice:
            if all(names is not None and name not in names for names in known):
                kept = ", ".join(sorted({each for names in known for each in names or ()}))
                raise ValueError(
                    f"Exchange(moments=...) names {name!r}, which a {type(optimizers[0]).__name__} "
                    f"does not keep of its parameters; it keeps {kept}"
                )
        for names in known:
            chosen.append({k: n for k, n in choice.items() if names is None or k in names})
        return chosen
    for optimizer in optimizers:
        names = _keeps(optimizer)
        if choice and names is None:
            logger.info(
                "Exchange(moments=True) does not know the state of a %s, so nothing of it is "
                "exchanged: name what should be, as in Exchange(moments={'exp_avg_sq': 16})",
                type(optimizer).__name__,
            )
        # With amsgrad one worker's largest gradient would stay in its peers' maxima for ever.
        has_maximum = any(group.get("amsgrad") for group in optimizer.param_groups)
        travels = choice and DEFAULT_MOMENT in (names or ()) and not has_maximum
        chosen.append({DEFAULT_MOMENT: DEFAULT_PERIOD} if travels else {})
    return chosen


def moments_due(moments: Sequence[Moment], *, is_default: bool) -> MomentsDue | None:
    """Return when these moments travel; None: there are none.

    By default one travels again after a part of its memory, of 1 / (1 - decay) steps, if not
    before. Periods that the user gave count exchanges alone.
    """
    if not moments:
        return None
    forgotten = 1.0 - min(each.decay for each in moments)
    num_steps = SHARE_OF_MEMORY / forgotten if is_default else math.inf
    return MomentsDue({each.period for each in moments}, num_steps)


def decay_of(name: str, optimizer: torch.optim.Optimizer) -> float:
    """Return the share of this tensor that a step keeps; 0 if the optimizer corrects no bias.

    It is that of the first parameter group. Others may differ: among workers of one age it has no
    effect.
    """
    betas = optimizer.param_groups[0].get("betas", ())
    index = BETAS.get(name)
    return float(betas[index]) if index is not None and index < len(betas) else 0.0


def kept_moments(
    segments: Sequence[tuple[Segment, Sequence[View]]],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    is_default: bool,
) -> list[list["KeptMoment"]]:
    """Return the moments of each optimizer that travel.

    Args:
        segments: the moments' flat memory, each with the parameters whose moments lie in it.
        is_default: these moments were not named, so one that cannot travel is left out with a
            warning; else it is an error.
    """
    kept: list[list[KeptMoment]] = [[] for _ in optimizers]
    for segment, views in segments:
        assert segment.moment is not None
        optimizer, name = optimizers[segment.optimizer_index], segment.moment.name
        level = logging.WARNING if is_default else logging.ERROR
        if _keeps(optimizer) is None and any(name in (_keeps(each) or ()) for each in optimizers):
            level = logging.INFO  # another one is known to keep such a tensor: that was meant
        moment = KeptMoment(segment, views, optimizer, level)
        kept[segment.optimizer_index].append(moment)
    return kept


class KeptMoment:
    """One moment of one optimizer, which lies in one flat tensor. The main thread's."""

    def __init__(
        self, segment: Segment, views: Sequence[View], optimizer: torch.optim.Optimizer, level: int
    ) -> None:
        assert segment.moment is not None
        self._moment, self._chunks = segment.moment, segment.chunks
        self._views, self._optimizer = views, optimizer
        self._finish = self._chunks[0].device.finish  # waits for what is queued there
        # The place of each parameter's moment, and its address once the tensor is there; 0 before.
        self._places = [view.alone(segment.x) for view in views]
        self._addresses = [0] * len(views)
        self._next = self._num_replaced = 0
        self._level = level  # of the message that it cannot travel; an error is raised
        self._is_given_up = self._has_warned = False

    def begins(self, *, wait: bool = False) -> None:
        """Add what exchanges have brought, before the optimizer steps, or a checkpoint is taken.

        Its step, with beta m + (1 - beta) g, then counts its new gradient whole. If it were added
        after the step, k exchanges in the time of a step would leave 1/2^k of that gradient. A
        moment's memory was then 2^k times as long, and training diverged with ``exp_avg`` in two
        exchanges a step (benchmarks/NOTES.md). If the optimizer's tensors were replaced since its
        last step, it stays pending.
        """
        if not self._is_given_up and self._has_pending and self._is_in_place():
            self._finish()
            for chunk in self._chunks:
                chunk.boundary(0.0, wait=wait)

    @property
    def _has_pending(self) -> bool:
        return any(chunk.has_pending for chunk in self._chunks)

    def stepped(self) -> None:
        """Count a step, and take in the tensors that the optimizer has replaced.

        The optimizer's boundary has not begun. This looks at one tensor after each step, so it sees
        at once if an optimizer replaces all of them. Before an average is added it looks at all:
        none may be added to memory that the optimizer no longer reads.
        """
        if self._moment.is_unsound and not self._has_warned:  # the gossip thread has found it
            self._has_warned = True
            logger.warning(
                "%r in the %s holds NaN, infinity, or values too large to be sent, for some "
                "parameters: they are not exchanged where that is so. Parameters are exchanged as "
                "before. Lower the learning rate or clip gradients",
                self._moment.name,
                self._who,
            )
        if self._is_given_up:
            return
        if self._is_in_place() and self._moment.steps:
            self._moment.steps += 1
            self._num_replaced = 0
            return
        self._num_replaced += self._take_in()
        if self._num_replaced == MOST_REPLACED:
            problem = f"the {self._who} replaces its {self._moment.name!r} at every step"
            self._give_up(problem, logging.WARNING)

    def _give_up(self, problem: str, level: int) -> None:
        self._moment.steps = 0
        if level == logging.ERROR:
            raise ValueError(f"Exchange(moments=...): {problem}")
        self._is_given_up = True
        logger.log(level, "%s, so it is not exchanged", problem)

    def _is_in_place(self) -> bool:
        self._next = (self._next + 1) % len(self._views)
        for index in range(len(self._views)) if self._has_pending else [self._next]:
            tensor = self._state_of(self._views[index]).get(self._moment.name)
            if tensor is not None and not self._is_at(index, tensor):
                return False
        return True

    def _is_at(self, index: int, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and local(tensor).data_ptr() == self._addresses[index]

    def _state_of(self, view: View) -> Mapping[str, Any]:
        # Without making an entry: the state is a defaultdict.
        state = self._optimizer.state.get(view.held)
        return state if isinstance(state, dict) else {}

    @torch.no_grad()
    def _take_in(self) -> bool:
        """Move the optimizer's tensors into flat memory; return whether any was there before.

        What exchanges have brought stays pending: it belongs to a weighted mean, whose other part,
        x, is now the optimizer's value. A parameter without such a tensor had no gradient yet. Its
        place takes part all the same: so the mean over workers is kept for those that train it.

        Race: the gossip thread may take a snapshot meanwhile, and would send new values with the
        old age. So the age is 0 while values are copied, and it sends nothing then.
        """
        name, steps, was_there, is_any = self._moment.name, 0.0, False, False
        for index, (view, place) in enumerate(zip(self._views, self._places, strict=True)):
            state = self._state_of(view)
            tensor = state.get(name)
            if tensor is None:
                continue
            is_any = True
            steps = max(steps, float(state.get("step", 0)))
            if self._is_at(index, tensor):
                continue
            if problem := _misfit(tensor, place):
                problem = f"the {self._who} keeps as {name!r} of {view.name!r} {problem}"
                self._give_up(problem, self._level)
                return False
            if self._moment.steps:
                self._moment.steps = 0
                for chunk in self._chunks:  # wait for the snapshot that is being taken
                    with chunk.lock, chunk.order:
                        pass
            place.copy_(local(tensor))
            self._optimizer.state[view.held][name] = as_sharded(tensor, place)
            was_there = was_there or self._addresses[index] != 0
            self._addresses[index] = place.data_ptr()
        if is_any:
            self._finish()  # queued on a device: no zeros are read once there are steps
            if steps < 1.0:  # it counts no steps, so it corrects no bias
                self._moment.decay = 0.0
            self._moment.steps = max(1, int(steps))
        elif any(view.held.grad is not None for view in self._views):
            keeps = sorted({str(each) for view in self._views for each in self._state_of(view)})
            problem = (
                f"the {self._who} keeps no {name!r} of its parameters; "
                f"it keeps {', '.join(keeps) or 'nothing'}"
            )
            self._give_up(problem, self._level)
        return was_there

    @property
    def _who(self) -> str:
        return type(self._optimizer).__name__


def _misfit(tensor: Any, place: Tensor) -> str:
    """Return how what an optimizer keeps differs from its place in flat memory; "" if it fits."""
    tensor = local(tensor) if isinstance(tensor, Tensor) else tensor
    if type(tensor) is not Tensor or tensor.shape != place.shape:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        return f"{shape}, not a tensor of its shape {tuple(place.shape)}"
    if (tensor.dtype, tensor.device) != (place.dtype, place.device):
        return f"{tensor.dtype} on {tensor.device}, not {place.dtype} on {place.device}"
    return ""
