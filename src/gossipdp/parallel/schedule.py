"""Learning rates that follow the progress of the whole run, and parameter groups without decay."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

SHAPES = ("constant", "linear", "cosine", "one_cycle")
ONE_CYCLE_WARMUP, ONE_CYCLE_START, ONE_CYCLE_END = 0.3, 1 / 25, 4e-6
"""Those of torch's OneCycleLR."""

FOLLOW_PROGRESS: "weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[ProgressLR]]"
FOLLOW_PROGRESS = weakref.WeakKeyDictionary()
"""The optimizers that have had a :class:`ProgressLR`, each with its last one."""


class HasProgress(Protocol):
    """A model, or a framework's adapter, that knows how far the run is."""

    def progress(self) -> float:
        """Return 0 at the start of the run and 1 at its end."""


class ProgressLR(LRScheduler):
    r"""Set learning rates by the progress of the whole run, not by this worker's step count.

    .. math:: lr(p) = lr_0 \cdot w(p) \cdot shape(p)

    with :math:`p` → ``model.progress()`` in 0..1 and :math:`lr_0` the rate that the optimizer has
    when its first schedule is made. :math:`w` rises linearly from ``start`` to 1 while p goes from
    0 to ``warmup``. A schedule of torch's counts steps, so under gossip it would run out early on a
    fast worker and late on a slow one; with this one all workers follow the same curve.

    Args:
        optimizer: its rates are the highest that the schedule sets: the present ones, or after an
            earlier schedule, of any kind, those before that: ``initial_lr`` in its groups.
        model: of :class:`~gossipdp.GossipDataParallel` with ``budget_samples`` or within
            ``epochs()``; or anything else with ``progress()``; or a function that returns it.
        shape: after the warm-up: ``"constant"``; ``"linear"`` or ``"cosine"``, which fall from 1 to
            ``end`` at p = 1; ``"one_cycle"``, whose warm-up is half a cosine too, like torch's
            OneCycleLR; a mapping of progress to factor for steps, so ``{0.5: 0.1, 0.75: 0.01}``
            divides by ten twice; or any function of p that returns a factor.
        warmup: the share of the run that warms up; by default none, and 0.3 for ``"one_cycle"``.
        start: the factor at p = 0; by default 0.01, and 1/25 for ``"one_cycle"``.
        end: the factor at p = 1; by default 0, and 4e-6 for ``"one_cycle"``.

    Call ``step()`` once after each ``optimizer.step()``. It goes wherever a torch scheduler does:
    into ``model.also_checkpoint(schedule=schedule)``, and to the trainers of frameworks.

    Raises:
        ValueError: an unknown shape, or a share or a factor outside 0..1.

    Example:
        >>> parameter = nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.8)
        >>> at = iter([0.0, 0.05, 0.1, 0.6])
        >>> schedule = ProgressLR(optimizer, lambda: next(at), {0.5: 0.1}, warmup=0.1, start=0.1)
        >>> rates = schedule.get_last_lr()
        >>> for _ in range(3):
        ...     optimizer.step()
        ...     schedule.step()
        ...     rates += schedule.get_last_lr()
        >>> [round(rate, 3) for rate in rates]
        [0.08, 0.44, 0.8, 0.08]

    References:
        Warm-up and steps for many workers: Goyal et al., 2017, arXiv 1706.02677, section 2.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: HasProgress | Callable[[], float],
        shape: Literal["constant", "linear", "cosine", "one_cycle"]
        | Mapping[float, float]
        | Callable[[float], float] = "constant",
        *,
        warmup: float | None = None,
        start: float | None = None,
        end: float | None = None,
    ) -> None:
        # Not isinstance(): from Python 3.12 on it does not see that of torch.compile(model).
        self._progress = cast(Callable[[], float], getattr(model, "progress", model))
        self._shape = shape
        is_cycle = shape == "one_cycle"
        self._warmup = _share("warmup", warmup, ONE_CYCLE_WARMUP if is_cycle else 0.0)
        self._start = _share("start", start, ONE_CYCLE_START if is_cycle else 0.01)
        self._end = _share("end", end, ONE_CYCLE_END if is_cycle else 0.0)
        if isinstance(shape, Mapping):
            for at in shape:
                _share("the progress of a step", at, 0.0)
        elif isinstance(shape, str) and shape not in SHAPES:
            raise ValueError(
                f"unknown shape {shape!r}; choose one of: {', '.join(SHAPES)}; or give a mapping "
                "of progress to factor, or a function of progress"
            )
        super().__init__(optimizer)
        FOLLOW_PROGRESS[optimizer] = weakref.ref(self)

    def factor(self, progress: float) -> float:
        """Return the factor of the first rates at that progress, 0 to 1."""
        shape, warmup = self._shape, self._warmup
        rising = progress / warmup if progress < warmup else 1.0
        if shape == "one_cycle":
            rising = 0.5 * (1 - math.cos(math.pi * rising))
        rest = (progress - warmup) / (1 - warmup) if progress > warmup else 0.0
        if isinstance(shape, Mapping):
            passed = [at for at in shape if at <= progress]
            after = shape[max(passed)] if passed else 1.0
        elif callable(shape):
            after = shape(progress)
        elif shape == "linear":
            after = 1 - (1 - self._end) * rest
        elif shape == "constant":
            after = 1.0
        else:
            after = self._end + (1 - self._end) * 0.5 * (1 + math.cos(math.pi * rest))
        return (self._start + (1 - self._start) * rising if warmup else 1.0) * after

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each parameter group at the present progress."""
        factor = self.factor(self._progress())
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the first rates, which is all that the progress does not give."""
        return {"base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the first rates, and set those of the present progress."""
        self.base_lrs = list(state_dict["base_lrs"])
        self.set_rates()

    def set_rates(self) -> None:
        """Set the rates of the present progress, without a step."""
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def set_rates(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Set the rates of the present progress, where a :class:`ProgressLR` sets them.

    A schedule is often made before the run's end is known, and without that it takes a worker that
    has just joined or resumed for one at the start. Rates that the script has set since stay.
    """
    for optimizer in optimizers:
        reference = FOLLOW_PROGRESS.get(optimizer)
        schedule = None if reference is None else reference()
        rates = [group["lr"] for group in optimizer.param_groups]
        if schedule is not None and schedule.get_last_lr() == rates:
            schedule.set_rates()


def _share(name: str, value: float | None, default: float) -> float:
    share = default if value is None else float(value)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{name} is a share in 0..1, not {value}")
    return share


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split a module's parameters so that norms and biases are not decayed.

    Args:
        module: whose trainable parameters to group.
        weight_decay: for the weights of two or more dimensions.

    Returns:
        Two parameter groups for an optimizer: weights with the decay, and one-dimensional
        parameters (biases, scales of normalisation layers) without; a group may be empty.

    Example:
        >>> groups = parameter_groups(nn.Linear(3, 2), weight_decay=5e-4)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.0005), (1, 0.0)]

    References:
        Goyal et al., 2017, section 5.3; the paper's training (section 5) does the same.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
