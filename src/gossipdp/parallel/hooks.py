"""What the wrapper hangs into the user's optimizers and module, and how it lets go of them."""

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gossipdp.parallel.checkpointer import CLOSE_TIMEOUT_S, EXIT_TIMEOUT_S, Checkpointer
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.monitoring import Monitoring
from gossipdp.parallel.schedule import ProgressLR

if TYPE_CHECKING:
    from gossipdp.parallel.module import GossipDataParallel

logger = logging.getLogger("gossipdp")

FOLLOWS_NO_COUNT = (ProgressLR, ReduceLROnPlateau)

_wrappers: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[GossipDataParallel]]"
_wrappers = weakref.WeakKeyDictionary()
"""The wrapper that each wrapped module takes part by, until it is closed or dropped."""


class Hooks:
    """The hooks of one wrapper; all hold it weakly, so that a dropped one can end.

    Args:
        model: the wrapper.
        optimizers: those that it was given.
        watches_others: raise where another optimizer steps the module's parameters.
    """

    def __init__(
        self,
        model: "GossipDataParallel",
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        watches_others: bool,
    ) -> None:
        self._optimizers = list(optimizers)
        self._module = model.module
        self._parameters = {id(parameter) for parameter in model.module.parameters()}
        self._num_boundaries = 0
        # The optimizers whose step() runs now (one may be a shell around another), or raised; and
        # how many boundaries there had been at its beginning.
        self._begun: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._begun = weakref.WeakKeyDictionary()
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        wrapper = weakref.ref(model)
        self._handles: list[RemovableHandle] = [
            each.register_step_post_hook(self._ended(wrapper, index))
            for index, each in enumerate(optimizers)
        ]
        if watches_others:
            self._handles.append(register_optimizer_step_pre_hook(self._any_begins))
            self._handles.append(register_optimizer_step_post_hook(self._any_ended))
        self._handles.append(
            model.module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
                _LoadedHook(wrapper)
            )
        )
        _wrappers[model.module] = wrapper

    def remove(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        _wrappers.pop(self._module, None)

    def _ended(
        self, wrapper: "weakref.ref[GossipDataParallel]", index: int
    ) -> Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]:
        def ended(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self._num_boundaries += 1
            model = wrapper()
            # GradScaler calls a fused optimizer's step also where it moves nothing. On a device
            # this waits for the step, as the boundary does anyway.
            found_inf = getattr(optimizer, "found_inf", None)
            if model is not None and not (found_inf is not None and bool(found_inf)):
                model._boundary(index)

        return ended

    def _any_begins(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._begun[optimizer] = self._num_boundaries

    def _any_ended(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise where an optimizer that was not wrapped has moved the module's parameters."""
        begun = self._begun.pop(optimizer, self._num_boundaries)
        is_within = any(each in self._begun for each in self._optimizers)
        if begun != self._num_boundaries or is_within or optimizer in self._others:
            return
        if any(
            id(parameter) in self._parameters
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise RuntimeError(
                f"a {type(optimizer).__name__} that was not wrapped has changed parameters of the "
                "wrapped module, so nothing was exchanged after its step. Wrap with every "
                "optimizer whose step() you call: GossipDataParallel(net, [first, second]); of an "
                "optimizer within another (SAM's base_optimizer) give the inner one"
            )
        self._others.add(optimizer)


class _LoadedHook:
    """The hook after loading; a copy of the module brings it along, but is not what trains."""

    def __init__(self, wrapper: "weakref.ref[GossipDataParallel] | None") -> None:
        self._wrapper = wrapper

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        model = None if self._wrapper is None else self._wrapper()
        if model is not None and module is model.module:
            model._engine.loaded()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or saved module has a hook that does nothing."""
        return _LoadedHook, (None,)


def checked_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list.

    Raises:
        ValueError: there is none, or one that calls no hooks after its steps.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise ValueError(f"{each!r} is no torch.optim.Optimizer")
        try:
            each.register_step_post_hook(lambda *_: None).remove()
        except AttributeError as error:
            raise ValueError(
                f"this {type(each).__name__} calls no hooks after a step, so it is a shell around "
                "the optimizer that does: give that one, or for Accelerate's wrap with "
                "gossipdp.integrations.accelerate.gossip_data_parallel"
            ) from error
    if not optimizers:
        raise ValueError("give at least one optimizer")
    return optimizers


def check_unwrapped(module: nn.Module, kind: type[nn.Module]) -> None:
    """Raise ValueError for a module in a wrapper of this ``kind``, or that averages by itself."""
    for each in module.modules():
        if isinstance(each, kind):
            raise ValueError("the module is wrapped already: use that wrapper, or give its .module")
        if isinstance(each, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "the module is within DistributedDataParallel, which averages gradients itself: "
                "give its .module"
            )
        wrapper = _wrappers.get(each)
        if wrapper is not None and wrapper() is not None:
            raise ValueError(
                "the module is wrapped already: use that wrapper, or close() it before"
            )


def warn_of_step_counters(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Log one warning where a scheduler of torch's counts the steps of one of these.

    Nothing leads from an optimizer to its schedulers, so all objects are looked at, once.
    """
    if not any(getattr(each.step, "_wrapped_by_lr_sched", False) for each in optimizers):
        return
    for found in gc.get_objects():
        kind = type(found)
        if not issubclass(kind, LRScheduler) or issubclass(kind, FOLLOWS_NO_COUNT):
            continue
        if any(vars(found).get("optimizer") is each for each in optimizers):
            logger.warning(
                "%s counts this worker's own steps, so it runs out early on a fast worker and late "
                "on a slow one: use gossipdp.ProgressLR(optimizer, model, shape), which follows "
                "the progress of the whole run",
                kind.__name__,
            )
            return


def close_parts(
    hooks: Hooks,
    monitoring: Monitoring,
    engine: Engine,
    checkpointer: Checkpointer,
    *,
    process_id: int,
    checkpoint_timeout_s: float = CLOSE_TIMEOUT_S,
) -> None:
    """Close a wrapper's parts.

    Garbage is collected in any thread, one of those that are ended here among them: what would
    wait for itself is left to a thread of its own. A forked child leaves its parent's run alone.
    """
    if os.getpid() != process_id:
        return

    def close() -> None:
        hooks.remove()
        monitoring.close()
        engine.close()
        checkpointer.close(checkpoint_timeout_s)

    if threading.current_thread().name.startswith("gossipdp"):
        threading.Thread(target=close, name="closing a dropped model", daemon=True).start()
    else:
        close()


def close_at_exit(finalizer: "weakref.finalize[Any, Any]") -> None:
    """Close what nobody has closed, in the short time that there is at exit."""
    detached = finalizer.detach()
    if detached is not None:
        _, _, parts, options = detached
        close_parts(*parts, **options, checkpoint_timeout_s=EXIT_TIMEOUT_S)
