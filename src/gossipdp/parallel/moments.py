"""The tensors that optimizers keep of each parameter, and those that travel with exchanges.

Adam divides its steps by the root of a running mean of squared gradients, ``exp_avg_sq``. A worker
that sees its own samples only has a poor mean where its gradients are rare. So workers average it,
as they average parameters but seldom: it changes slowly.

The optimizer keeps such a tensor in its own state. After its first step, and whenever a state was
loaded into it, the tensor is replaced by a view of flat memory that holds the same values; the
optimizer, ``state_dict()`` and its readers see no difference. Exchanges average that memory in
chunks (:class:`~gossipdp.dynamics.moments.MomentChunk`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gossipdp.dynamics.moments import Moment
from gossipdp.dynamics.state import Segment
from gossipdp.parallel.shards import as_sharded, local

logger = logging.getLogger("gossipdp")

Periods: TypeAlias = Mapping[str, int]
"""By the name of a tensor in the optimizer's state: one exchange in so many carries it."""

# An optimizer that replaces its tensors at every step is given up after so many in a row.
MOST_REPLACED = 3
# The index of the beta that belongs to a tensor, in optimizers that correct the bias.
BETAS = {"exp_avg": 0, "exp_avg_sq": 1}


class Kind(NamedTuple):
    """A kind of optimizers: the tensors that they keep for a parameter, and those that travel."""

    optimizers: tuple[type[torch.optim.Optimizer], ...]
    keeps: tuple[str, ...]
    travels: tuple[str, ...]


KINDS = (
    Kind(
        (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        ("exp_avg", "exp_avg_sq"),
        ("exp_avg_sq",),
    ),
    Kind((torch.optim.SGD, torch.optim.Muon), ("momentum_buffer",), ()),
)
"""The moments of ``Exchange(moments=True)``; none under ``amsgrad=True``. They follow from class
and settings, not from an optimizer's state: all workers must decide alike, before any step too.
"""

DEFAULT_PERIOD = 4
"""By default one exchange in so many carries moments, or the first one after ``SHARE_OF_MEMORY``.

16 simulated workers with one exchange a step end 4.4% above all-reduce after 256 steps if v travels
with each exchange (beta_2 = 0.999), 5.6% with every 4th, 8.2% with every 42nd and 8.9% without v;
with four exchanges a step 2.4% if v travels once a step. 0.99 and 0.95 are much the same
(benchmarks/NOTES.md). Every 4th exchange with v adds 25% to the bytes, each 100%.
"""
SHARE_OF_MEMORY = 1 / 4


def _kind(optimizer: torch.optim.Optimizer) -> Kind | None:
    return next((kind for kind in KINDS if isinstance(optimizer, kind.optimizers)), None)


def steps_between(decay: float) -> float:
    """Return the gradient steps after which a moment travels again by default, if not before.

    ``decay``: the share of it that a step keeps, so that it remembers 1 / (1 - decay) steps.
    """
    return SHARE_OF_MEMORY / max(1.0 - decay, 1e-9)


def _default(optimizer: torch.optim.Optimizer) -> Periods:
    kind = _kind(optimizer)
    # With amsgrad one worker's largest gradient would stay in its peers' maxima for ever.
    has_maximum = any(group.get("amsgrad") for group in optimizer.param_groups)
    return {} if kind is None or has_maximum else dict.fromkeys(kind.travels, DEFAULT_PERIOD)


def chosen_moments(
    choice: bool | Periods, optimizers: Sequence[torch.optim.Optimizer]
) -> list[Periods]:
    """Return the tensors of each optimizer's state that travel.

    A given name counts for every optimizer that keeps such a tensor, and for every optimizer of an
    unknown kind. By default an optimizer with ``amsgrad=True`` sends none.

    Raises:
        ValueError: a name is given that none of these optimizers keeps.
    """
    kinds = [_kind(optimizer) for optimizer in optimizers]
    if choice is True:
        for optimizer in (each for each, kind in zip(optimizers, kinds, strict=True) if not kind):
            logger.info(
                "Exchange(moments=True) does not know the state of a %s, so nothing of it is "
                "exchanged: name what should be, as in Exchange(moments={'exp_avg_sq': 16})",
                type(optimizer).__name__,
            )
    if isinstance(choice, bool):
        return [_default(optimizer) if choice else {} for optimizer in optimizers]
    for name in choice:
        if all(kind is not None and name not in kind.keeps for kind in kinds):
            kept = sorted({each for kind in kinds if kind is not None for each in kind.keeps})
            raise ValueError(
                f"Exchange(moments=...) names {name!r}, which a "
                f"{type(optimizers[0]).__name__} does not keep of its parameters; it keeps "
                f"{', '.join(kept)}"
            )
    return [
        {name: n for name, n in choice.items() if kind is None or name in kind.keeps}
        for kind in kinds
    ]


def is_meant(name: str, index: int, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether a name may be for this optimizer.

    It is not if this one's kind is unknown and another one's known kind keeps such a tensor.
    """
    kinds = [_kind(optimizer) for optimizer in optimizers]
    is_kept = any(kind is not None and name in kind.keeps for kind in kinds)
    return kinds[index] is not None or not is_kept


def decay_of(name: str, optimizer: torch.optim.Optimizer) -> float:
    """Return the share of this tensor that a step keeps; 0 if the optimizer corrects no bias.

    It is that of the first parameter group. Others may differ: among workers of one age it has no
    effect.
    """
    betas = optimizer.param_groups[0].get("betas", ())
    index = BETAS.get(name)
    return float(betas[index]) if index is not None and index < len(betas) else 0.0


class Place(NamedTuple):
    """A parameter, and the view of flat memory where its moment belongs."""

    name: str
    parameter: Tensor
    view: Tensor


class Moments:
    """Keeps the moments that travel in flat memory, step by step. The main thread's.

    Args:
        segments: the moments' flat memory, each with its parameters' places in it.
        optimizers: of the wrapper.
        is_default: these moments were not named, so one that cannot travel is left out with a
            warning; else it is an error.
        finish: waits for what is queued on a device.
    """

    def __init__(
        self,
        segments: Sequence[tuple[Segment, Sequence[Place]]],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_default: bool,
        finish: Callable[[], None],
    ) -> None:
        self._kept: list[list[_Kept]] = [[] for _ in optimizers]
        for segment, places in segments:
            self._kept[segment.optimizer_index].append(_Kept(segment, places, optimizers, finish))
        self._is_default = is_default

    def begins(self, optimizer_index: int) -> None:
        """Add what exchanges have brought, before an optimizer steps.

        Its step, with beta m + (1 - beta) g, then counts its new gradient whole. If it were added
        after the step, k exchanges in the time of a step would leave 1/2^k of that gradient. A
        moment's memory was then 2^k times as long, and training diverged with ``exp_avg`` in two
        exchanges a step (benchmarks/NOTES.md).
        """
        for kept in self._kept[optimizer_index]:
            kept.begins()

    def stepped(self, optimizer_index: int) -> None:
        """Look at an optimizer that has stepped, before its boundary begins.

        Raises:
            ValueError: it keeps no such tensor as was named, and no other optimizer can be meant.
        """
        for kept in list(self._kept[optimizer_index]):
            kept.warn_if_unsound()
            try:
                kept.stepped()
            except _CannotTravelError as error:
                if error.is_wrong and kept.is_meant and not self._is_default:
                    raise ValueError(f"Exchange(moments=...): {error}") from None
                self._kept[optimizer_index].remove(kept)
                is_expected = error.is_wrong and not kept.is_meant
                level = logging.INFO if is_expected else logging.WARNING
                logger.log(level, "%s, so it is not exchanged", error)


class _CannotTravelError(Exception):
    """A moment cannot travel. ``is_wrong``: it was a mistake to name it."""

    def __init__(self, reason: str, *, is_wrong: bool) -> None:
        super().__init__(reason)
        self.is_wrong = is_wrong


class _Kept:
    """One moment of one optimizer, over one flat tensor."""

    def __init__(
        self,
        segment: Segment,
        places: Sequence[Place],
        optimizers: Sequence[torch.optim.Optimizer],
        finish: Callable[[], None],
    ) -> None:
        assert segment.moment is not None
        index = segment.optimizer_index
        self.is_meant = is_meant(segment.moment.name, index, optimizers)
        self._moment: Moment = segment.moment
        self._chunks = segment.chunks
        self._finish = finish
        self._places = places
        self._optimizer = optimizers[index]
        self._num_states = 0
        # The address of each tensor once it is in flat memory; 0 before.
        self._addresses = [0] * len(places)
        self._next = 0
        self._num_replaced = 0
        self._is_warning_due = True

    def warn_if_unsound(self) -> None:
        """Warn once that some of it was not exchanged: the gossip thread finds it under a lock."""
        if self._moment.is_unsound and self._is_warning_due:
            self._is_warning_due = False
            logger.warning(
                "%r in the %s holds NaN, infinity, or values too large to be sent, for some "
                "parameters: they are not exchanged where that is so. Parameters are exchanged as "
                "before. Lower the learning rate or clip gradients",
                self._moment.name,
                self._who,
            )

    def begins(self) -> None:
        """Add what is pending, unless the optimizer's tensors were replaced since its last step."""
        if any(chunk.has_pending for chunk in self._chunks) and self._is_in_place():
            self._finish()
            for chunk in self._chunks:
                chunk.boundary(0.0)

    def stepped(self) -> None:
        """Count a step, and take in the tensors that the optimizer has replaced.

        It looks at one tensor after each step, so it sees at once if an optimizer replaces all of
        them. Before an average is added it looks at all: none may be added to memory that the
        optimizer no longer reads.
        """
        if self._moment.steps == 0:
            if not self._may_have_begun():
                return
        elif self._is_in_place():
            self._moment.steps += 1
            self._num_replaced = 0
            return
        if self._take_in():
            self._num_replaced += 1
        if self._num_replaced == MOST_REPLACED:
            self._moment.steps = 0
            raise _CannotTravelError(
                f"the {self._who} replaces its {self._moment.name!r} at every step",
                is_wrong=False,
            )

    def _may_have_begun(self) -> bool:
        """Return whether it is worth looking: frozen parameters may never have a state."""
        before, self._num_states = self._num_states, len(self._optimizer.state)
        place = self._places[self._following()]
        has_begun = place.parameter.grad is not None or bool(self._state_of(place))
        return has_begun or self._num_states != before

    def _is_in_place(self) -> bool:
        if any(chunk.has_pending for chunk in self._chunks):
            return all(map(self._is_place_taken, range(len(self._places))))
        return self._is_place_taken(self._following())

    def _following(self) -> int:
        """Return the place to look at after this step: each in its turn."""
        self._next = (self._next + 1) % len(self._places)
        return self._next

    def _is_place_taken(self, index: int) -> bool:
        tensor = self._state_of(self._places[index]).get(self._moment.name)
        return tensor is None or self._is_at(index, tensor)

    def _is_at(self, index: int, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and local(tensor).data_ptr() == self._addresses[index]

    def _state_of(self, place: Place) -> Mapping[str, Any]:
        # Without making an entry: the state is a defaultdict.
        state = self._optimizer.state.get(place.parameter)
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
        for index, place in enumerate(self._places):
            state = self._state_of(place)
            tensor = state.get(name)
            if tensor is None:
                continue
            is_any = True
            steps = max(steps, float(state.get("step", 0)))
            if self._is_at(index, tensor):
                continue
            self._check(place, tensor)
            self._hold_back()
            place.view.copy_(local(tensor))
            self._optimizer.state[place.parameter][name] = as_sharded(tensor, place.view)
            was_there = was_there or self._addresses[index] != 0
            self._addresses[index] = place.view.data_ptr()
        if is_any:
            self._finish()  # queued on a device: no zeros are read once there are steps
            if steps < 1.0:  # it counts no steps, so it corrects no bias
                self._moment.decay = 0.0
            self._moment.steps = max(1, int(steps))
        elif any(place.parameter.grad is not None for place in self._places):
            states = (self._state_of(place) for place in self._places)
            keeps = sorted({str(each) for state in states for each in state})
            raise _CannotTravelError(
                f"the {self._who} keeps no {name!r} of its parameters; "
                f"it keeps {', '.join(keeps) or 'nothing'}",
                is_wrong=True,
            )
        return was_there

    def _hold_back(self) -> None:
        """Set the age to 0 for later snapshots, and wait for one that is being taken."""
        if self._moment.steps:
            self._moment.steps = 0
            for chunk in self._chunks:
                with chunk.lock, chunk.order:
                    pass

    def _check(self, place: Place, tensor: Any) -> None:
        view = place.view
        tensor = local(tensor) if isinstance(tensor, Tensor) else tensor
        if type(tensor) is not Tensor or tensor.shape != view.shape:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            problem = f"{shape}, not a tensor of its shape {tuple(view.shape)}"
        elif (tensor.dtype, tensor.device) != (view.dtype, view.device):
            problem = f"{tensor.dtype} on {tensor.device}, not {view.dtype} on {view.device}"
        else:
            return
        self._moment.steps = 0
        raise _CannotTravelError(
            f"the {self._who} keeps as {self._moment.name!r} of {place.name!r} {problem}",
            is_wrong=True,
        )

    @property
    def _who(self) -> str:
        return type(self._optimizer).__name__
