"""A module's parameters and buffers within flat tensors, and the watch over them."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import Moment, Role
from gossipdp.dynamics.device import zeros
from gossipdp.dynamics.state import CHUNK_BYTES, Segment, State
from gossipdp.errors import ModelChangedError
from gossipdp.links import frames
from gossipdp.logs import OF_RUN
from gossipdp.parallel.moments import Periods, decay_of
from gossipdp.parallel.shards import as_sharded, local, reshard
from gossipdp.parallel.views import MOST_UNOPTIMIZED, View, digest_of, sample

logger = logging.getLogger("gossipdp")

ALIGNMENT_BYTES = 64
CHUNK_VARIABLE = "GOSSIPDP_CHUNK_MIB"
CUTS = {False: (256, 1 << 22), True: (4, 1 << 25)}
"""A model is cut into at least so many chunks, of at most so many bytes: in host memory, and on an
accelerator.

One pass over a chunk is a part of a turn of the gossip thread, which must stay short. On an
accelerator a pass takes microseconds, but each is a launch, and launches are Python that training
waits for (benchmarks/NOTES.md). A few chunks are enough for one to travel beside the next.
"""


def chunk_bytes_for(model_bytes: int, *, is_on_accelerator: bool = False) -> int:
    """Return the size of a chunk of a model of this size, in whole MiB.

    A boundary takes one lock for each chunk, so chunks grow with the model. All workers must cut
    alike: where some are on accelerators and some are not, GOSSIPDP_CHUNK_MIB must say how.
    """
    if (given := os.environ.get(CHUNK_VARIABLE)) is not None:
        if not given.isdecimal() or not 1 <= int(given) <= frames.MAX_CHUNK_BYTES >> 20:
            most = frames.MAX_CHUNK_BYTES >> 20
            raise ValueError(f"{CHUNK_VARIABLE} is {given!r}: it takes a whole number, 1 to {most}")
        return int(given) << 20
    least_chunks, most_bytes = CUTS[is_on_accelerator]
    chunk_bytes = model_bytes // least_chunks
    return min(max(chunk_bytes, CHUNK_BYTES), most_bytes) // CHUNK_BYTES << 20


class FlatParameters:
    """Moves a module's parameters and buffers into flat segments, in place.

    Every parameter keeps its identity, shape and strides (channels_last stays so); its memory
    becomes a 64-byte aligned piece of a segment, with a storage of its own over it. Tied
    parameters are moved once. Non-persistent buffers are caches that the module makes itself; they
    stay where they are, and so does a large frozen base. Optimizers' parameter groups say which
    boundary covers which parameter.

    A shard of a DTensor is not moved: FSDP gathers parameters from memory of its own, so that
    memory becomes a segment. Every parameter has one, even if this process holds none of its
    values.

    Args:
        views: of the module's parameters and buffers; see :func:`~.views.views_of`.
        momentum: whether trained parameters carry c (method ``a2cid2``).
        moments: the tensors of each optimizer's state that travel; by default none.

    Attributes:
        state: the flat segments, cut into chunks.
        base_digest: of a sample of the frozen base, which must be alike; "": there is none.
        moment_places: the state's moments, each with the parameters whose parts lie in it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        views: Sequence[View],
        *,
        momentum: bool,
        moments: Sequence[Periods] = (),
    ) -> None:
        self._module = module
        self._optimizers = list(optimizers)
        self._num_optimized = [_num_parameters(optimizer) for optimizer in optimizers]
        self._views = [view for view in views if view.role is not Role.FROZEN]
        self._base = [view for view in views if view.role is Role.FROZEN]
        self.base_digest = digest_of(self._base)
        tensors = [view.tensor for view in self._views]
        chunk_bytes = chunk_bytes_for(
            sum(tensor.nbytes for tensor in tensors),
            is_on_accelerator=any(tensor.device.type != "cpu" for tensor in tensors),
        )
        segments: list[Segment] = []
        self.moment_places: list[tuple[Segment, list[View]]] = []
        for trained, held in self._move(momentum, chunk_bytes):
            segments.append(trained)
            owner = trained.optimizer_index
            is_optimized = held[0].optimizer_index is not None
            is_kept = trained.role is Role.TRAINED and is_optimized and trained.chunks and moments
            for name, period in sorted(moments[owner].items()) if is_kept else ():
                segment = Segment(
                    zeros(trained.x.numel(), trained.x.dtype, trained.x.device),
                    Role.MOMENT,
                    momentum=False,
                    optimizer_index=owner,
                    chunk_bytes=chunk_bytes,
                    moment=Moment(name, period, decay_of(name, optimizers[owner])),
                )
                self.moment_places.append((segment, held))
        self.state = State(segments, moments=[segment for segment, _ in self.moment_places])
        self._flats = [segment.x for segment in self.state.segments]
        # The boundary of an optimizer looks at its own, that of the first also at those of none.
        self._views_of: list[list[View]] = [[] for _ in optimizers]
        for view in self._views:
            self._views_of[view.optimizer_index or 0].append(view)
        self._frozen = [
            view
            for view in views
            if view.is_parameter and view.role is not Role.TRAINED and not view.held.requires_grad
        ]
        # The places of buffers, also if forward() assigns others there.
        self._known = {(id(owner), key) for view in views for owner, key in view.owners}
        self._watches_buffers = True
        self._num_checks = 0
        self._watched = self._base
        self._seen: list[Tensor] = []

    def _move(self, momentum: bool, chunk_bytes: int) -> Iterator[tuple[Segment, list[View]]]:
        """Lay out one segment per (role, optimizer, dtype, device) and move the values there.

        Parameters of no optimizer have a segment of their own, since they have no moments.
        """
        groups: dict[tuple[Any, ...], list[View]] = {}
        for view in self._views:
            tensor = view.tensor
            shard = view.name if view.is_shard else ""
            key = (view.role, view.optimizer_index, tensor.dtype, tensor.device, shard)
            groups.setdefault(key, []).append(view)
        for index, views in enumerate(groups.values()):
            first = views[0]
            if first.is_shard:  # its memory becomes the segment
                first.segment, first.data_ptr = index, first.tensor.data_ptr()
                flat = first.tensor.view(-1)
            else:
                flat = self._moved(views, index)
            segment = Segment(
                flat,
                first.role,
                momentum=momentum,
                optimizer_index=first.optimizer_index or 0,
                chunk_bytes=chunk_bytes,
            )
            yield segment, views

    def _moved(self, views: Sequence[View], index: int) -> Tensor:
        """Move tensors of one type and device to one flat tensor, that of segment ``index``."""
        dtype, device = views[0].tensor.dtype, views[0].tensor.device
        alignment = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        length = 0
        for view in views:
            view.segment, view.offset = index, length
            length += -(-view.tensor.numel() // alignment) * alignment
        flat = zeros(length, dtype, device)
        for view in views:
            with torch.no_grad():
                view.of(flat).copy_(view.tensor)
            self._bind(view, flat)
        return flat

    @staticmethod
    def _bind(view: View, flat: Tensor) -> None:
        view.tensor.data = view.alone(flat)
        view.data_ptr = view.tensor.data_ptr()

    def description(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return what must agree between workers: a text and the shape for each tensor, in order.

        The text is the name, type, role and segment, and the strides if they are unusual; never the
        device: a CPU and a CUDA worker may train together.
        """
        lines = []
        for view in self._views + self._base:
            dtype = str(view.tensor.dtype).removeprefix("torch.")
            place = "" if view.role is Role.FROZEN else f", segment {view.segment}"
            if place and not view.tensor.is_contiguous():
                place += f", strides {view.stride}"
            lines.append((f"{view.name} ({dtype}, {view.role.value}{place})", tuple(view.shape)))
        return lines

    def frozen_names(self) -> set[str]:
        """Return all names in the module of what is left alone."""
        reshard(self._module)  # else the module holds what FSDP has gathered
        held = {id(view.held) for view in self._base}
        named = (
            *self._module.named_parameters(remove_duplicate=False),
            *self._module.named_buffers(remove_duplicate=False),
        )
        return {name for name, tensor in named if id(tensor) in held}

    def check(self, optimizer_index: int | None = None) -> None:
        """Find, at a boundary of this optimizer (None: of all), what was moved or replaced.

        A tensor whose storage was exchanged for another of the same kind (``param.data = ...``, a
        buffer assigned in ``forward``) is copied into its view and bound to it again. That does not
        count as a load: some optimizers do so at every step, such as SAM when it undoes its first
        half.

        Raises:
            ModelChangedError: parameters moved to another device or precision, replaced by new
                objects (``assign=True``), unfrozen, or added to an optimizer after wrapping.
        """
        for view in self._views if optimizer_index is None else self._views_of[optimizer_index]:
            if view.is_shard:
                now = local(view.held)
                if now.data_ptr() != view.data_ptr or now.shape != view.shape:
                    raise ModelChangedError(
                        f"the shard of {view.name!r} lies elsewhere than when the module was "
                        "wrapped, so exchanges do not see it. Call .to(), load with assign=True "
                        "and shard before wrapping, or wrap again"
                    )
            elif view.tensor.data_ptr() != view.data_ptr:
                self._adopt_storage(view)
            for owner, key in view.owners:
                if owner.get(key) is not view.held:
                    self._adopt_replacement(view, owner, key)
        for index in range(len(self._optimizers)) if optimizer_index is None else [optimizer_index]:
            count, expected = _num_parameters(self._optimizers[index]), self._num_optimized[index]
            if count != expected:
                raise ModelChangedError(
                    f"the optimizer held {expected} parameters when the module was wrapped and "
                    f"holds {count} now; add parameter groups before wrapping"
                )
        for view in self._frozen:
            if view.held.requires_grad:
                raise ModelChangedError(
                    f"parameter {view.name!r} was frozen when the module was wrapped and is "
                    "trainable now; workers would not average it. Wrap with "
                    "exchange=Exchange(frozen=True), or unfreeze before wrapping"
                )
        if optimizer_index:
            return
        self._num_checks += 1
        is_due = self._num_checks in (1, 2, 3, 10, 100, 1000)
        if self._watched and is_due:
            self._watch_frozen()
        if self._watches_buffers and (optimizer_index is None or is_due):
            self._watch_buffers()  # None: before a checkpoint, or an average

    @torch.no_grad()
    def _watch_frozen(self) -> None:
        """Warn once if something of the frozen base changes; look at a few values of each."""
        seen = [sample(local(view.held), 4) for view in self._watched]
        for view, before, now in zip(self._watched, self._seen, seen, strict=False):
            if not torch.equal(before, now):
                logger.warning(
                    "%r changes although no optimizer trains it. Since more than %g times as many "
                    "values as are trained belong to none, it was taken for a frozen base: it is "
                    "neither averaged nor saved in checkpoints, and workers will not end equal. "
                    "Wrap with exchange=Exchange(frozen=True)",
                    view.name,
                    MOST_UNOPTIMIZED,
                    extra=OF_RUN,
                )
                self._watched = []
                return
        self._seen = seen

    def _watch_buffers(self) -> None:
        """Warn once of a buffer that the module has made, or filled, since wrapping."""
        for prefix, part in self._module.named_modules():
            for key in sorted(part._buffers.keys() - part._non_persistent_buffers_set):
                held = part._buffers[key]
                if held is None or not held.numel() or (id(part._buffers), key) in self._known:
                    continue
                logger.warning(
                    "buffer %r was made after wrapping: no checkpoint holds it, and workers will "
                    "not end with the same. Make it before (let the module see a batch, then wrap) "
                    "or register it with persistent=False",
                    f"{prefix}.{key}" if prefix else key,
                    extra=OF_RUN,
                )
                self._watches_buffers = False
                return

    def _adopt_replacement(self, view: View, owner: dict[str, Tensor | None], key: str) -> None:
        new = owner.get(key)
        if view.is_shard and type(new) is nn.Parameter:
            return  # FSDP has gathered it, for a forward pass without a backward pass
        if new is not None:
            self._refuse_change(view, local(new))
        if view.is_parameter or new is None:
            change = "removed" if new is None else "replaced by another object"
            raise ModelChangedError(
                f"{view.name!r} was {change} after wrapping, and the optimizer and the other "
                "workers have the old one. Load without assign=True; change it before wrapping"
            )
        view.tensor.copy_(new)
        owner[key] = view.tensor

    def _adopt_storage(self, view: View) -> None:
        flat = self._flats[view.segment]
        tensor = view.tensor
        if tensor.device.type == "cpu" and tensor.is_shared():
            raise ModelChangedError(
                f"{view.name!r} was moved to memory that processes share (by share_memory(), or a "
                "queue of torch.multiprocessing), and exchanges need it where it was: share "
                "copies, such as those of model.state_dict(), and renew them"
            )
        self._refuse_change(view, tensor)
        for layout in (torch.channels_last, torch.channels_last_3d):
            here, there = (
                each.is_contiguous(memory_format=layout) for each in (view.of(flat), tensor)
            )
            if there and not (here or tensor.is_contiguous()):
                raise ModelChangedError(
                    f"{view.name!r} was turned to {layout} after wrapping, which would be undone: "
                    "call .to(memory_format=...) before wrapping, or wrap again"
                )
        with torch.no_grad():
            view.of(flat).copy_(tensor)
        self._bind(view, flat)

    def _refuse_change(self, view: View, now: Tensor) -> None:
        flat = self._flats[view.segment]
        then = tuple(view.shape), flat.dtype, flat.device
        pairs = zip(then, (tuple(now.shape), now.dtype, now.device), strict=True)
        changes = [f"from {old} to {new}" for old, new in pairs if old != new]
        if changes:
            advice = "Call .to(), .half() and the like before wrapping, or wrap again"
            if view.shape != now.shape:
                advice = "Resize parameters before wrapping; buffers may grow with persistent=False"
            elif not view.is_parameter:
                advice += "; if forward() assigns this buffer, register it with persistent=False"
            raise ModelChangedError(
                f"{view.name!r} has changed {', '.join(changes)} since wrapping. {advice}"
            )

    @torch.no_grad()
    def swap(self, flats: Sequence[Tensor]) -> None:
        """Let the module hold the values of other flat tensors, which take its own.

        Exchanges go on there. The addresses stay: FSDP gathers from them, and CUDA graphs read
        them. :meth:`swap_back` ends it.
        """
        self.state.device.finish()  # all that was queued within averaged()
        for segment, flat in zip(self.state.segments, flats, strict=True):
            segment.swap(flat)
        torch.clear_autocast_cache()  # it knows parameters by their identity, not their values
        reshard(self._module)

    def swap_back(self) -> None:
        """Let the module hold its own values again."""
        self.swap(self._flats)

    def exchanged(self, tensors: Iterable[Tensor]) -> list[View]:
        """Return those of these parameters and buffers that exchanges change."""
        ids = set(map(id, tensors))
        return [view for view in self._views if id(view.held) in ids and view.role.is_exchanged]

    def forget(self, loaded: Iterable[View]) -> None:
        """Drop what exchanges have brought to these, and their momentum."""
        for view in loaded:
            self.state.segments[view.segment].forget(view.offset, view.tensor.numel())

    def named(self, flats: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Map each name to its view of ``flats``, which are of the same layout or None."""
        places = ((view, flats[view.segment]) for view in self._views)
        return {view.name: view.of(flat) for view, flat in places if flat is not None}

    def tensors(self, theta: float) -> dict[str, Tensor]:
        """Copy x (with what is pending) and c at the phase ``theta``, by name, for a checkpoint.

        Every chunk is copied at once, before an exchange or after it.
        """
        self.state.device.finish()
        flats = zip(*(segment.copy(theta) for segment in self.state.segments), strict=True)
        return {
            f"{kind}/{name}": values.contiguous()
            for kind, copies in zip(("model", "c"), flats, strict=True)
            for name, values in self.named(copies).items()
        }

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a checkpoint's tensors, before the gossip thread exists."""
        segments = self.state.segments
        pendings = self.named([s.pending if s.role.is_exchanged else None for s in segments])
        momenta = self.named([s.c for s in segments])
        for name, x in self.named([s.x for s in segments]).items():
            values, c = tensors[f"model/{name}"].to(x.device), tensors.get(f"c/{name}")
            x.copy_(values)
            if name in pendings:  # what x has no bits for
                pendings[name].copy_(values - x)
            if c is not None and name in momenta:
                momenta[name].copy_(c)
            elif c is not None and name in pendings:  # saved under another method: z goes on
                update.flow(pendings[name], c.to(x.device), 0.5)
        for chunk in self.state.chunks:
            chunk.restored()

    def held(self) -> list[Tensor]:
        """Return copies of the flat tensors that the module reads."""
        return [flat.clone() for flat in self._flats]

    def export(self, values: dict[str, Any], flats: Sequence[Tensor]) -> None:
        """Replace what lies in the parameters' storage, in a ``state_dict``, by that of ``flats``.

        A hook may have split or transposed a parameter: each view of its storage becomes the same
        view of the other.
        """
        others = {
            view.data_ptr: view.alone(flats[view.segment])
            for view in self._views
            if view.tensor.numel()
        }
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                continue
            here = local(value)
            # Every parameter has a storage of its own, which begins where it does.
            other = others.get(here.untyped_storage().data_ptr())
            if other is not None and other.dtype == here.dtype:
                other = other.as_strided(here.shape, here.stride(), here.storage_offset())
                values[name] = as_sharded(value, other)


def _num_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
