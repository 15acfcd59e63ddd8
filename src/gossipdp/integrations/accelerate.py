"""Your own loop under Hugging Face Accelerate."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gossipdp.integrations import needed_from
from gossipdp.parallel.module import GossipDataParallel

with needed_from("transformers"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType


def gossip_data_parallel(
    accelerator: Accelerator,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    **options: Any,
) -> GossipDataParallel:
    """Wrap what ``accelerator.prepare`` has returned.

    Args:
        accelerator: made within ``single_process()``, so that it is one process.
        module: the prepared module.
        optimizer: the prepared optimizer, or several.
        options: of :class:`~gossipdp.GossipDataParallel`.

    Returns:
        The model to call in the loop; ``accelerator.backward``, ``accumulate(module)`` and the
        prepared optimizer and scheduler go on as before.

    Raises:
        ValueError: the accelerator itself is of several processes, or an option is wrong.

    Example:
        >>> from gossipdp.integrations import single_process
        >>> with single_process():
        ...     accelerator = Accelerator(cpu=True)
        >>> net = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> net, optimizer = accelerator.prepare(net, optimizer)
        >>> model = gossip_data_parallel(accelerator, net, optimizer, graph="ring")
        >>> accelerator.backward(model(torch.zeros(8, 4)).sum())
        >>> optimizer.step()
        >>> model.consolidate().samples
        8
    """
    if accelerator.distributed_type != DistributedType.NO:
        raise ValueError(
            f"this Accelerator is distributed itself ({accelerator.distributed_type.value}, "
            f"{accelerator.num_processes} processes): make it within `with single_process():`, "
            "and without DeepSpeed, FSDP or Megatron, which do not work with gossipdp"
        )
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return GossipDataParallel(module, [torch_optimizer(each) for each in several], **options)


def torch_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps: the hooks of Accelerate's shell around it never run."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
