"""A module's parameters and buffers, and the part that each has in exchanges."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.device import refusal
from gossipdp.dynamics.update import is_finite
from gossipdp.parallel.shards import local

AVERAGED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_UNOPTIMIZED = 2.0
"""Parameters of no optimizer are averaged at the end if they are at most so many times as large as
the trained ones: this includes an EMA or a target network, and excludes an adapter's frozen base.
"""


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
    optimizer_index: int
    is_optimized: bool
    requires_grad: bool
    shape: torch.Size
    stride: tuple[int, ...]
    segment: int = 0
    offset: int = 0
    data_ptr: int = 0

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.held, nn.Parameter)

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
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], exchange_frozen: bool
) -> list[View]:
    """Return every distinct parameter and persistent buffer, in the module's own order.

    Raises:
        ValueError: optimizers and module do not fit together, or a tensor cannot be moved.
    """
    optimizer_of = _optimizer_of(module, optimizers, exchange_frozen)
    views = list(_views(module, optimizer_of, exchange_frozen))
    for view in views:
        if (reason := refusal(device := view.tensor.device)) is not None:
            raise ValueError(f"{view.name!r} is on {device}. {reason}")
    _check_memory(module)
    return views


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every distinct parameter and persistent buffer by its first name."""
    return {view.name: view.tensor for view in _views(module, {}, exchange_frozen=False)}


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


def _views(
    module: nn.Module, optimizer_of: dict[int, int], exchange_frozen: bool
) -> Iterator[View]:
    """Yield every distinct parameter and persistent buffer, in the module's own order."""
    views: dict[int, View] = {}
    for prefix, submodule in module.named_modules():
        places = [(submodule._parameters, key) for key in submodule._parameters]
        places += [
            (submodule._buffers, key)
            for key in submodule._buffers
            if key not in submodule._non_persistent_buffers_set
        ]
        for owner, key in places:
            held = owner[key]
            if held is None:
                continue
            if id(held) in views:
                views[id(held)].owners.append((owner, key))
                continue
            name = f"{prefix}.{key}" if prefix else key
            index = optimizer_of.get(id(held))
            tensor = local(held)
            views[id(held)] = View(
                name=name,
                held=held,
                tensor=tensor,
                owners=[(owner, key)],
                role=_role(name, held, index is not None, exchange_frozen),
                optimizer_index=index or 0,
                is_optimized=index is not None,
                requires_grad=held.requires_grad,
                shape=tensor.shape,
                # The strides of a dense copy: the tensor's own, unless it overlaps itself.
                stride=torch.empty_like(tensor, device="meta").stride(),
            )
    _set_following(list(views.values()))
    yield from views.values()


def _set_following(views: Sequence[View]) -> None:
    """Let the parameters of no optimizer be averaged in the end, unless they are a frozen base.

    Their size decides, and not whether they change: so all workers decide alike, also those that
    join a running job.
    """
    trained = sum(view.tensor.nbytes for view in views if view.role is Role.TRAINED)
    others = [
        view for view in views if view.role is Role.FROZEN and view.tensor.dtype in AVERAGED_DTYPES
    ]
    if sum(view.tensor.nbytes for view in others) <= MOST_UNOPTIMIZED * trained:
        for view in others:
            view.role = Role.UNOPTIMIZED


def _check_memory(module: nn.Module) -> None:
    """Refuse tensors that share memory: wrapping gives each parameter its own.

    Two buffers may overlap: views of one table of constants stay equal.
    """
    regions = []
    for name, held in [*module.named_parameters(), *module.named_buffers()]:
        tensor = local(held)
        is_parameter = isinstance(held, nn.Parameter)
        # On a GPU every tensor says that it is shared.
        is_shared = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
        if is_parameter and is_shared:
            raise ValueError(
                f"parameter {name!r} lies in memory that processes share (share_memory()), and "
                "wrapping would move it to memory of its own: wrap copy.deepcopy(module)"
            )
        if tensor.numel() and tensor.layout is torch.strided:
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


def _role(name: str, tensor: Tensor, is_optimized: bool, exchange_frozen: bool) -> Role:
    if not isinstance(tensor, nn.Parameter):
        # A buffer of infinities, such as a mask, is a constant and has no average.
        is_averaged = tensor.is_floating_point() and is_finite(local(tensor))
        return Role.BUFFER if is_averaged else Role.COPIED
    if not (exchange_frozen or (tensor.requires_grad and is_optimized)):
        return Role.FROZEN
    if not tensor.is_floating_point():
        raise ValueError(
            f"parameter {name!r} is {tensor.dtype}; gossip averages floating-point parameters "
            "(hold a complex parameter as its real view)"
        )
    return Role.TRAINED
