"""A module's parameters and buffers, and the part that each has in exchanges."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.device import refusal
from gossipdp.dynamics.update import is_finite
from gossipdp.parallel.options import Exchange
from gossipdp.parallel.shards import local

AVERAGED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_UNOPTIMIZED = 2.0
"""Parameters of no optimizer are averaged at the end if they are at most so many times as large as
the trained ones: this includes an EMA or a target network, and excludes an adapter's frozen base.
"""
STATISTICS = ("running_mean", "running_var")
"""Buffers that are averaged by default, in a module that has both: torch's norms and their like."""
SAMPLED_VALUES = 512
"""Values of a frozen tensor for the digest: few, as each may lie on a disk page of its own."""


@dataclass(slots=True)
class View:
    """One parameter or buffer and its place in a flat tensor.

    ``held`` is the module's own object, and ``tensor`` holds its values: it is the same object, or
    this process's part of a DTensor.
    """

    name: str
    held: Tensor
    tensor: Tensor
    owners: list[tuple[dict[str, Tensor | None], str]]
    role: Role
    optimizer_index: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    segment: int = 0
    offset: int = 0
    data_ptr: int = 0

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.held, nn.Parameter)

    @property
    def is_float(self) -> bool:
        return self.tensor.dtype in AVERAGED_DTYPES

    @property
    def is_plain(self) -> bool:
        """True if flat memory of its type can hold it: no quantized or packed values."""
        is_own_kind = type(self.held) not in (Tensor, nn.Parameter) and not self.is_shard
        return not _is_packed(self.tensor) and (self.is_float or not is_own_kind)

    @property
    def is_shard(self) -> bool:
        return self.tensor is not self.held

    def of(self, flat: Tensor) -> Tensor:
        """Return the view of a flat tensor at this place, with the parameter's own strides."""
        # as_strided counts from the storage's beginning, but a large flat begins later in its own.
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def alone(self, flat: Tensor) -> Tensor:
        """Return the memory of :meth:`of` as a tensor whose storage holds nothing else.

        Programs that save models tell tensors apart by their storage: if several share one,
        Accelerate saves the first alone, and safetensors' ``save_model`` refuses them.
        """
        start = self.offset * flat.itemsize
        own = flat.view(torch.uint8)[start : start + self.tensor.numel() * flat.itemsize]
        # As bytes, which DLPack knows whatever the type.
        alone: Tensor = from_dlpack(to_dlpack(own))
        return alone.view(flat.dtype).as_strided(self.shape, self.stride)


def views_of(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    exchange: Exchange = Exchange(),  # noqa: B008
) -> list[View]:
    """Return every distinct parameter and persistent buffer, in the module's own order.

    An empty buffer stays where it is, as one that is not persistent does.
    """
    optimizer_of = _optimizer_of(module, optimizers, exchange.frozen)
    by_id: dict[int, View] = {}
    for prefix, submodule in module.named_modules():
        places = [(submodule._parameters, key) for key in submodule._parameters]
        places += [
            (submodule._buffers, key)
            for key in submodule._buffers
            if key not in submodule._non_persistent_buffers_set
        ]
        for owner, key in places:
            held = owner[key]
            name = f"{prefix}.{key}" if prefix else key
            if held is None:
                continue
            if owner is submodule._buffers and not held.numel():
                # Quantization-aware training watches values with modules whose buffers grow later.
                if any(
                    each.__module__.startswith("torch.ao.quant") for each in type(submodule).__mro__
                ):
                    raise ValueError(
                        f"{name!r} takes its shape from the first batch: let the module see one, "
                        "then make the optimizer and wrap"
                    )
                continue
            if held.layout is not torch.strided:
                raise ValueError(
                    f"{name!r} is {held.layout}, which workers cannot exchange: register a buffer "
                    "with persistent=False, or hold indices and values"
                )
            if id(held) in by_id:
                by_id[id(held)].owners.append((owner, key))
                continue
            tensor = local(held)
            by_id[id(held)] = view = View(
                name=name,
                held=held,
                tensor=tensor,
                owners=[(owner, key)],
                role=Role.FROZEN,
                optimizer_index=optimizer_of.get(id(held)),
                shape=tensor.shape,
                # The strides of a dense copy: the tensor's own, unless it overlaps itself.
                stride=tensor.stride()
                if _is_packed(tensor)
                else torch.empty_like(tensor, device="meta").stride(),
            )
            view.role = _role(view, submodule, exchange)
    views = list(by_id.values())
    _set_roles_by_size(views, exchange.frozen)
    for view in views:
        reason = None if view.role is Role.FROZEN else refusal(view.tensor.device)
        if reason is not None:
            raise ValueError(f"{view.name!r} is on {view.tensor.device}. {reason}")
    names = [view.name for view in views if not view.is_parameter]
    for pattern in exchange.buffers or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"Exchange(buffers=...) names {pattern!r}, and the module has no such persistent "
                f"buffer; it has {', '.join(names) or 'none'}"
            )
    _check_memory(module, {id(view.held) for view in views if view.role is Role.FROZEN})
    return views


def sample(tensor: Tensor, num_values: int) -> Tensor:
    """Return some values of a tensor, evenly spread, as bytes in host memory."""
    if _is_wrapper(tensor):
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return torch.cat([sample(getattr(tensor, name), num_values) for name in names])
    values = tensor.detach().resolve_conj().resolve_neg()
    values = values.int_repr() if values.is_quantized else values
    if values.is_meta or not values.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    stride = -(-values.numel() // num_values)
    places = torch.arange(0, values.numel(), stride, device=values.device)
    values = values[torch.unravel_index(places, values.shape)] if values.dim() else values.view(1)
    return values.cpu().view(torch.uint8)


def digest_of(base: Sequence[View]) -> str:
    """Return a digest of a sample of frozen values, which must be alike; "" if there are none."""
    digest = hashlib.sha256()
    for view in base:
        digest.update(sample(view.tensor, SAMPLED_VALUES).numpy().tobytes())
    return digest.hexdigest()[:16] if base else ""


def _optimizer_of(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], exchange_frozen: bool
) -> dict[int, int]:
    """Map the id of every optimized parameter to its optimizer's index."""
    own = {id(parameter) for parameter in module.parameters()}
    optimizer_of: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise ValueError(
                        f"optimizer {index} updates a parameter of shape "
                        f"{tuple(parameter.shape)} that is not part of the module; wrap a module "
                        "that holds every optimized parameter"
                    )
                if optimizer_of.setdefault(id(parameter), index) != index:
                    raise ValueError(
                        f"optimizers {optimizer_of[id(parameter)]} and {index} update the same "
                        f"parameter of shape {tuple(parameter.shape)}; give each its own"
                    )
    if not optimizer_of:
        raise ValueError("the optimizer holds none of the module's parameters")
    held = (parameter for parameter in module.parameters() if id(parameter) in optimizer_of)
    if not (exchange_frozen or any(parameter.requires_grad for parameter in held)):
        raise ValueError(
            "all parameters that the optimizer holds are frozen (requires_grad=False), so nothing "
            "would train: unfreeze before wrapping, or wrap with exchange=Exchange(frozen=True)"
        )
    return optimizer_of


def _role(view: View, owner: nn.Module, exchange: Exchange) -> Role:
    """Return the role by kind; :func:`_set_roles_by_size` has the last word on some."""
    name, dtype = view.name, view.held.dtype
    if view.is_parameter:
        is_optimized = view.optimizer_index is not None
        if not (exchange.frozen or (view.held.requires_grad and is_optimized)):
            return Role.FROZEN
        if not view.is_float:
            raise ValueError(
                f"parameter {name!r} is {dtype}, which has no average: hold a complex one as its "
                "real view; leave any other frozen, without Exchange(frozen=True)"
            )
        return Role.TRAINED
    if exchange.buffers is None:
        has_both = all(owner._buffers.get(each) is not None for each in STATISTICS)
        key = name.rpartition(".")[2]
        is_averaged = key in STATISTICS and has_both and view.is_float
    else:
        is_averaged = any(fnmatchcase(name, pattern) for pattern in exchange.buffers)
    if is_averaged and not view.is_float:
        raise ValueError(f"Exchange(buffers=...) names {name!r}: {dtype} has no average")
    return Role.BUFFER if is_averaged else Role.COPIED


def _set_roles_by_size(views: Sequence[View], exchange_frozen: bool) -> None:
    """Let the parameters of no optimizer be averaged in the end, unless they are a frozen base.

    Their size decides, and not whether they change: so all workers decide alike, also those that
    join a running job, and all processes of a replica, whose own parts may differ. Integer buffers
    of such a size are the packed weights of a quantized base.
    """
    trained = sum(view.held.nbytes for view in views if view.role is Role.TRAINED)
    parameters = [view for view in views if view.role is Role.FROZEN]
    packed = [
        view
        for view in views
        if view.role is Role.COPIED
        and (not view.is_plain or not (view.held.is_floating_point() or view.held.is_complex()))
    ]
    for others in (parameters, [] if exchange_frozen else packed):
        is_small = sum(view.held.nbytes for view in others) <= MOST_UNOPTIMIZED * trained
        for view in others:
            if not (is_small and view.is_plain):
                view.role = Role.FROZEN
            elif view.is_parameter:
                tensor = view.tensor.detach()
                # A mask has infinities. Of shards each process sees its own part.
                has_mean = view.is_float and (tensor.is_meta or is_finite(tensor))
                view.role = Role.UNOPTIMIZED if has_mean else Role.COPIED


def _check_memory(module: nn.Module, left_alone: Collection[int]) -> None:
    """Refuse tensors that share memory: wrapping gives each parameter its own.

    Two buffers may overlap: views of one table of constants stay equal. So may those left alone.
    """
    regions = []
    for name, held in [*module.named_parameters(), *module.named_buffers()]:
        tensor = local(held)
        if _is_wrapper(tensor) or tensor.layout is not torch.strided:
            continue
        is_parameter = isinstance(held, nn.Parameter) and id(held) not in left_alone
        # On a GPU every tensor says that it is shared.
        is_shared = tensor.device.type == "cpu" and tensor.is_shared()
        if is_parameter and is_shared:
            raise ValueError(
                f"parameter {name!r} lies in memory that processes share (share_memory()), and "
                "wrapping would move it to memory of its own: wrap copy.deepcopy(module)"
            )
        if tensor.numel():
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in sizes)
            start = tensor.data_ptr()
            end = start + extent * tensor.itemsize
            regions.append((str(tensor.device), start, end, name, is_parameter))
    furthest = ("", 0, 0, "", False)
    for region in sorted(regions):
        device, start, end, name, is_parameter = region
        if device == furthest[0] and start < furthest[2]:
            if is_parameter or furthest[4]:
                raise ValueError(
                    f"{furthest[3]!r} and {name!r} lie in the same memory (tied through .data, or "
                    "views of one tensor?), and wrapping would part them. Tie them as one "
                    "parameter, as in decoder.weight = encoder.weight; or give each memory of its "
                    "own by .clone()"
                )
            if end <= furthest[2]:
                continue
        furthest = region


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether the values lie in other tensors, as those of quantized weights do."""
    return bool(is_traceable_wrapper_subclass(tensor))


def _is_packed(tensor: Tensor) -> bool:
    return tensor.is_quantized or _is_wrapper(tensor)
