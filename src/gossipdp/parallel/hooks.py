"""The hooks of the wrapper in the user's optimizers and module, and their removal."""

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gossipdp.errors import ModelChangedError
from gossipdp.logs import OF_RUN
from gossipdp.parallel.entry import Entry
from gossipdp.parallel.options import GROUPS
from gossipdp.parallel.schedule import FOLLOW_PROGRESS
from gossipdp.parallel.shards import reshard

logger = logging.getLogger("gossipdp")

WRAPPING = "GossipDataParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))"

_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda _: None)
"""The code of every optimizer's step(), which calls the hooks and the class's own step."""

_wrapped: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""The modules that take part in a run, until their wrapper is closed or dropped."""
_left_alone: "weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle]"
_left_alone = weakref.WeakKeyDictionary()
"""The optimizers whose wrapper was dropped, each with the hook that says so."""


class Hooks:
    """One pair of hooks around every optimizer's step, and those of the module; see :meth:`remove`.

    The pair is torch's global one, since steps of optimizers that were not wrapped matter too. Its
    pre-hook runs before any other of an optimizer, and its post-hook after them.

    Args:
        begins, stepped: called with the index of an optimizer whose step is next, or has ended.
        loaded: called with what was loaded into the module.
        counting_once: makes the closure that a step gets count its samples once, however often the
            optimizer calls it.
    """

    def __init__(
        self,
        worker: Entry,
        *,
        begins: Callable[[int], None],
        loaded: Callable[[Iterable[Tensor]], None],
        stepped: Callable[[int], None],
        counting_once: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        module, optimizers = worker.module, worker.optimizers
        self._indices = {optimizer: index for index, optimizer in enumerate(optimizers)}
        self._module = module
        self._between_steps = worker.between_steps
        self._begins, self._stepped, self._counting_once = begins, stepped, counting_once
        self._parameters = {id(each): name for name, each in module.named_parameters()}
        self._num_boundaries = 0
        # The number of boundaries when an optimizer's step began: the optimizer may be a shell
        # around another, whose step then has had its boundary.
        self._begun: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._begun = weakref.WeakKeyDictionary()
        self._has_grown = False
        for each in optimizers:
            if (handle := _left_alone.pop(each, None)) is not None:
                handle.remove()
        # A compiled step() must not trace these hooks into its graph.
        disable: Callable[[Any], Any] = torch.compiler.disable
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(disable(self._before)),
            register_optimizer_step_post_hook(disable(self._after)),
            # Every module of the process calls these; the next step looks for what was registered.
            register_module_parameter_registration_hook(self._grows),
            register_module_module_registration_hook(self._grows),
        ]
        # Every part has a hook: loading a part calls the hooks of that part alone.
        self._handles.extend(
            each.register_load_state_dict_post_hook(
                _LoadedHook(weakref.ref(each), weakref.ref(module), loaded)
            )
            for each in module.modules()
        )
        _wrapped.add(module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        _wrapped.discard(self._module)

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer in _steps_around():
            return None
        self._begun[optimizer] = self._num_boundaries
        index = self._indices.get(optimizer)
        if index is None:
            return None
        self._between_steps.begins(optimizer)
        self._begins(index)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return None
        counted = self._counting_once(closure)
        if "closure" in kwargs:
            return args, kwargs | {"closure": counted}
        return (args[0], counted, *args[2:]), kwargs

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Begin the boundary of a wrapped optimizer; of another, check that it needs none."""
        around = _steps_around()
        if optimizer in around:
            return
        index = self._indices.get(optimizer)
        if index is None:
            self._refuse_new_parameters()
            self._refuse_unwrapped(optimizer, around)
            return
        self._between_steps.ended(optimizer)
        self._num_boundaries += 1
        self._refuse_new_parameters()
        # GradScaler calls a fused optimizer's step even if that moves nothing. This waits for the
        # device, as GradScaler does before a step that is not fused.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not found_inf:
            self._stepped(index)

    def _grows(self, *_: object) -> None:
        self._has_grown = True

    def _refuse_new_parameters(self) -> None:
        if self._has_grown:
            reshard(self._module)  # what FSDP has gathered is no new parameter
        for name, parameter in self._module.named_parameters() if self._has_grown else ():
            if parameter.requires_grad and id(parameter) not in self._parameters:
                change = "replaced" if name in self._parameters.values() else "added to the module"
                raise ModelChangedError(
                    f"parameter {name!r} was {change} after wrapping, so workers neither exchange "
                    "nor average it. Add it, and give it to an optimizer, before wrapping (load "
                    "without assign=True); or close() the wrapper and wrap again"
                )
        self._has_grown = False

    def _refuse_unwrapped(
        self, optimizer: torch.optim.Optimizer, around: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Raise if parameters of the module moved, and no wrapped optimizer stepped meanwhile."""
        if any(each in around for each in self._indices):
            return
        if self._begun.pop(optimizer, self._num_boundaries) != self._num_boundaries:
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


def _steps_around() -> list[torch.optim.Optimizer]:
    """Return the optimizers whose step() is running when a hook is called, innermost first.

    Torch hooks into ``step`` class by class, so a step() that calls ``super().step()`` calls the
    hooks twice, and the outermost is the step. The stack shows which it is, even after a step that
    raised and never ended.
    """
    return _callers(_HOOKED_STEP)[1:]


def _callers(method: Any) -> list[Any]:
    """Return the objects whose ``method`` runs now in this thread, innermost first."""
    owners, code = [], method.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            owners.append(frame.f_locals["self"])
        frame = frame.f_back
    return owners


@dataclass(eq=False)
class _LoadedHook:
    """The hook after loading; a copy of the module has another one, as it is not what trains.

    One load goes through many parts, and the outermost one alone reports it: the part whose
    ``load_state_dict`` was called, or the wrapped module if that part contains it.
    """

    part: Callable[[], nn.Module | None] = lambda: None  # as in modules that 0.2 has saved
    wrapped: Callable[[], nn.Module | None] = lambda: None
    loaded: Callable[[Iterable[Tensor]], None] = lambda _: None

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        wrapped, root = self.wrapped(), next(iter(_callers(nn.Module.load_state_dict)), module)
        if wrapped is None or module is not self.part():
            return
        is_either_within = root in set(wrapped.modules()) or wrapped in set(root.modules())
        if module in (root, wrapped) or not is_either_within:
            self.loaded([*module.parameters(), *module.buffers()])

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a copied or saved module a hook that does nothing, and needs no gossipdp."""
        return getattr, (contextlib.nullcontext(), "__exit__")


_REFUSED = {
    "DistributedDataParallel": "averages gradients itself: give its .module",
    "FullyShardedDataParallel": "keeps its parts in a form that exchanges would destroy: shard "
    "with torch.distributed.fsdp.fully_shard instead (docs/shards.md)",
    "SyncBatchNorm": "makes workers wait for one another in each forward pass: use BatchNorm, "
    "whose running statistics exchanges average",
    "ScriptModule": "does not let exchanges hold its parameters: use the plain module, under "
    "torch.compile if you like, and script model.module after consolidate()",
}
"""Reasons and remedies for classes of torch's. The names suffice, and import nothing."""


def check_arguments(module: Any, unknown: Mapping[str, Any], wrapper: type) -> None:
    """Raise if the first argument is no module that can be wrapped, or a keyword is unknown."""
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"the first argument is the module, not a {type(module).__name__}: {WRAPPING}"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name!r} has no shape yet: let the module see a batch once, then make the "
                "optimizer and wrap"
            )
    for name, each in module.named_modules():
        if isinstance(each, wrapper) or each in _wrapped:
            raise ValueError("the module is wrapped already: close() that, and give its .module")
        for base in type(each).__mro__:
            if base.__module__.startswith("torch.") and base.__name__ in _REFUSED:
                raise ValueError(
                    f"the module holds a {base.__name__} ({name or 'itself'}), which "
                    f"{_REFUSED[base.__name__]}"
                )
    for name in unknown:
        known = [each for each in signature(wrapper).parameters if each != "unknown"]
        near = get_close_matches(name, known, 1)
        problem = f"there is no argument {name!r}"
        if name == "broadcast_buffers":
            problem += (
                ": it is of DistributedDataParallel. Exchanges average BatchNorm's statistics, "
                "and every other buffer is its worker's own until the end: leave it out, or for no "
                "average either give exchange=gossipdp.Exchange(buffers=())"
            )
        elif name in signature(nn.parallel.DistributedDataParallel).parameters:
            problem += (
                ": it is of DistributedDataParallel, which averages gradients within each backward "
                "pass. Leave it out: the module is on its device, and exchanges need no hint"
            )
        elif homes := [each.__name__ for each in GROUPS if name in signature(each).parameters]:
            problem += f": give {homes[0].lower()}=gossipdp.{homes[0]}({name}=...)"
        elif near:
            problem += f": do you mean {near[0]}"
        raise TypeError(problem)


def checked_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list; raise if one calls no hooks after its steps."""
    given: Any = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise ValueError(
                f"the second argument is a torch.optim.Optimizer, or a list of them, and a "
                f"{type(each).__name__} is none: {WRAPPING}"
            )
        if type(each).__name__ == "ZeroRedundancyOptimizer":
            raise ValueError(
                "a ZeroRedundancyOptimizer shares its state with processes that step at once: give "
                f"{type(vars(each)['optim']).__name__} itself, or use fully_shard (docs/shards.md)"
            )
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
    """Log one warning if a scheduler of torch's, and no ProgressLR, sets the rates of one of these.

    torch marks the step of an optimizer that has any scheduler, ProgressLR those that it serves.
    """
    for each in optimizers:
        if getattr(each.step, "_wrapped_by_lr_sched", False) and each not in FOLLOW_PROGRESS:
            logger.warning(
                "a learning-rate scheduler of the %s counts this worker's own steps, so it runs "
                "out early on a fast worker and late on a slow one: use "
                "gossipdp.ProgressLR(optimizer, model, shape), which follows the progress of the "
                "whole run",
                type(each).__name__,
                extra=OF_RUN,
            )
            return
