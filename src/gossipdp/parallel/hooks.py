"""What the wrapper hangs into the user's optimizers and module, and how it lets go of them."""

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gossipdp.errors import ModelChangedError
from gossipdp.parallel.schedule import ProgressLR

logger = logging.getLogger("gossipdp")

FOLLOWS_NO_COUNT = (ProgressLR, ReduceLROnPlateau)

_wrapped: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""The modules that take part in a run, until their wrapper is closed or dropped."""
_left_alone: "weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle]"
_left_alone = weakref.WeakKeyDictionary()
"""The optimizers whose wrapper was dropped, each with the hook that says so."""


class Hooks:
    """What is hung into optimizers and module; see :meth:`remove`.

    Args:
        module, optimizers: of the wrapper.
        stepped: called with the index of an optimizer that has stepped.
        loaded: called when the module's parameters were loaded.
        watches_others: raise where another optimizer steps the module's parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        stepped: Callable[[int], None],
        loaded: Callable[[], None],
        watches_others: bool,
    ) -> None:
        self._optimizers = list(optimizers)
        self._module = module
        self._stepped = stepped
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._num_boundaries = 0
        # The optimizers whose step() runs now (one may be a shell around another), or raised; and
        # how many boundaries there had been at its beginning.
        self._begun: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._begun = weakref.WeakKeyDictionary()
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._has_grown = False
        for each in optimizers:
            if (handle := _left_alone.pop(each, None)) is not None:
                handle.remove()
        self._handles: list[RemovableHandle] = [
            each.register_step_post_hook(self._ended(index))
            for index, each in enumerate(optimizers)
        ]
        # Of every module there is: what was registered is looked for at the next step.
        self._handles.append(register_module_parameter_registration_hook(self._grows))
        self._handles.append(register_module_module_registration_hook(self._grows))
        if watches_others:
            self._handles.append(register_optimizer_step_pre_hook(self._any_begins))
            self._handles.append(register_optimizer_step_post_hook(self._any_ended))
        self._handles.append(
            module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
                _LoadedHook(weakref.ref(module), loaded)
            )
        )
        _wrapped.add(module)

    def remove(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        _wrapped.discard(self._module)

    def _ended(
        self, index: int
    ) -> Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]:
        def ended(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self._num_boundaries += 1
            self._refuse_new_parameters()
            # GradScaler calls a fused optimizer's step also where it moves nothing. On a device
            # this waits for the step, as the boundary does anyway.
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is None or not found_inf:
                self._stepped(index)

        return ended

    def _grows(self, *_: object) -> None:
        self._has_grown = True

    def _refuse_new_parameters(self) -> None:
        for name, parameter in self._module.named_parameters() if self._has_grown else ():
            if parameter.requires_grad and id(parameter) not in self._parameters:
                raise ModelChangedError(
                    f"parameter {name!r} was added to the module after wrapping, so workers "
                    "neither exchange nor average it. Add it, and give it to an optimizer, before "
                    "wrapping; or close() the wrapper and wrap again"
                )
        self._has_grown = False

    def _any_begins(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._begun[optimizer] = self._num_boundaries

    def _any_ended(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise where an optimizer that was not wrapped has moved the module's parameters."""
        self._refuse_new_parameters()
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

    def __init__(
        self, trained: "weakref.ref[nn.Module] | None", loaded: Callable[[], None] | None
    ) -> None:
        self._trained = trained
        self._loaded = loaded

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        if self._trained is not None and self._loaded is not None and module is self._trained():
            self._loaded()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or saved module has a hook that does nothing."""
        return _LoadedHook, (None, None)


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
        if each in _wrapped:
            raise ValueError(
                "the module is wrapped already: use that wrapper, or close() it before"
            )


def warn_of_steps_alone(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Log one warning at the next step of any of these, unless they are wrapped again before."""
    is_due = True

    def warn(*_: object) -> None:
        nonlocal is_due
        if is_due:
            is_due = False
            logger.warning(
                "this model trains alone: its GossipDataParallel has left the run, since nothing "
                "refers to it any more. Keep it until the end: model = GossipDataParallel(net, "
                "optimizer), then train, then model.consolidate(). To leave the run on purpose "
                "call model.close()"
            )

    for each in optimizers:
        _left_alone[each] = each.register_step_post_hook(warn)


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
