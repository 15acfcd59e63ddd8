"""The flat parameters of a module, as wrapping makes them."""

from typing import Any

import torch
from checkpointing import sgd
from torch import nn

from gossipdp.parallel.flat_parameters import FlatParameters
from gossipdp.parallel.options import Exchange
from gossipdp.parallel.views import views_of


def flatten(
    module: nn.Module, *optimizers: torch.optim.Optimizer, moments: Any = (), **exchange: Any
) -> FlatParameters:
    """Flatten a module, trained by an SGD unless optimizers are given."""
    optimizers = optimizers or (sgd(module),)
    views = views_of(module, optimizers, Exchange(**exchange))
    return FlatParameters(module, optimizers, views, momentum=True, moments=moments)
