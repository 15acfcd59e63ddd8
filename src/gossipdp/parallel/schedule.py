"""Learning-rate schedules on global progress, and parameter groups without decay."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def large_batch_schedule(
    optimizer: torch.optim.Optimizer,
    progress: Callable[[], float],
    num_workers: int | Callable[[], int],
    *,
    warmup: float = 0.05,
    milestones: Sequence[float] = (0.5, 0.75),
    decay: float = 0.1,
) -> LambdaLR:
    r"""The schedule of Goyal et al. for many workers, on the progress of the whole run.

    .. math:: lr(p) = lr_0 \cdot w(p) \cdot decay^{\#\{m \in milestones: m \le p\}}

    with :math:`p` → ``progress()`` in 0..1, and :math:`w` rising linearly from 1 at :math:`p = 0`
    to ``num_workers`` at :math:`p` = ``warmup``: the rate that suits one worker, scaled by their
    number. The paper (section 5) trains with it, milestones at 1/2 and 3/4 of 100 epochs and 5
    epochs of warm-up on CIFAR-10.

    Progress is global: workers of different speed follow one schedule, which counting local steps
    would not do.

    Args:
        optimizer: its present rates are those of one worker.
        progress: of the run, in 0..1: ``model.progress`` of a model with ``budget_samples``.
        num_workers: the factor after warm-up; where it is not known yet, what tells it then.
        warmup: where the warm-up ends.
        milestones: where the rate is multiplied by ``decay``; ascending.
        decay: the factor.

    Returns:
        A torch scheduler; call its ``step()`` once after each ``optimizer.step()``.

    Raises:
        ValueError: a fraction lies outside 0..1, the milestones do not ascend, or there is no
            worker.

    Example:
        >>> parameter = nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.1)
        >>> at = iter([0.0, 0.05, 0.6])
        >>> schedule = large_batch_schedule(optimizer, lambda: next(at), num_workers=8)
        >>> rates = schedule.get_last_lr()
        >>> for _ in range(2):
        ...     optimizer.step()
        ...     schedule.step()
        ...     rates += schedule.get_last_lr()
        >>> [round(rate, 3) for rate in rates]
        [0.1, 0.8, 0.08]

    References:
        Goyal et al., 2017, arXiv 1706.02677, section 2.
    """
    if not 0.0 <= warmup <= 1.0:
        raise ValueError(f"warmup is a fraction of the run in 0..1, not {warmup}")
    if list(milestones) != sorted(set(milestones)) or not all(0.0 <= m <= 1.0 for m in milestones):
        raise ValueError(f"milestones must ascend within 0..1, not {tuple(milestones)}")

    def factor(_: int) -> float:
        now, count = progress(), num_workers() if callable(num_workers) else num_workers
        if count < 1:
            raise ValueError(
                f"num_workers is {count}; it must be at least 1. A worker that joins a run does "
                "not know it before it has wrapped its model: give what tells it then, such as "
                "lambda: model.num_workers"
            )
        rising = min(1.0, now / warmup) if warmup > 0.0 else 1.0
        scale: float = 1.0 + (count - 1) * rising
        return scale * decay ** sum(milestone <= now for milestone in milestones)

    return LambdaLR(optimizer, factor)


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
