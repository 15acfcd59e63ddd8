"""The optimizers' state, which a worker saves, gives to another, and takes over.

Races while it is given and taken, besides those of :mod:`gossipdp.gossip.transfer`:

- The donor trains on: its optimizers' state is read between its steps and its parameters chunk by
  chunk, so the two are a few steps apart, as parameters and momentum of gossip always are.
- The donor dies, stops or stalls: the next one is asked for all of it.
- Rank 0 trains on at the start, while others take its state: they take that of a few steps later.
- Parameters, buffers or optimizers' state hold NaN or infinity: the taker checks them.
- All donors consolidate meanwhile: each refuses; when all have left, the joiner ends with an error.
- Nothing advances for ``start_timeout_s``: the joiner ends with an error. The whole may take any
  time.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_map_only

from gossipdp.dynamics.device import Device, Mark
from gossipdp.dynamics.state import State
from gossipdp.dynamics.update import is_finite
from gossipdp.errors import PeerLostError, RendezvousError
from gossipdp.gossip.loop import GossipLoop
from gossipdp.gossip.thread import Background, GossipThread
from gossipdp.gossip.transfer import NoStateYetError, Offer, TurnedAwayError
from gossipdp.logs import OF_RUN
from gossipdp.parallel import packing
from gossipdp.parallel.options import Network
from gossipdp.parallel.shards import as_sharded, local

logger = logging.getLogger("gossipdp")

SHARD = "shard"
"""The name of a process's part of a tensor, if it holds only a part."""
PAUSE_BETWEEN_ROUNDS_S = 0.1
# The most that a donor's optimizers' state may take, beside this worker's own model. AdamW takes
# twice the parameters, Shampoo and its like more.
TRAINING_BYTES_PER_BYTE = 32
OTHER_TRAINING_BYTES = 64 << 20


def capture(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the optimizers' states as they are now, not copied; of a DTensor, its own part."""
    captured = []
    for values in [optimizer.state_dict() for optimizer in optimizers]:
        state = {  # parameters have numbers, other state has names
            name: tree_map_only(Tensor, _own_part, held) if isinstance(name, int) else held
            for name, held in values["state"].items()
        }
        captured.append(values | {"state": state})
    return {"optimizers": captured}


def check_state(optimizer: torch.optim.Optimizer, *, is_saved: bool) -> None:
    """Warn, or raise if it ``is_saved``, of values that no checkpoint and no joiner could take."""
    try:
        packing.check_savable(
            capture([optimizer])["optimizers"][0],
            f"the state of the {type(optimizer).__name__}",
            "use an optimizer that keeps plain tensors, numbers and text, or wrap without a "
            "directory for checkpoints",
        )
    except ValueError as error:
        if is_saved:
            raise
        logger.warning(
            "a worker that joins or starts again cannot take over this one's optimizer, since %s",
            error,
            extra=OF_RUN,
        )


def _own_part(tensor: Tensor) -> Any:
    """Return a tensor, or ``{SHARD: part}`` if it is a DTensor; :func:`_sharded` undoes it."""
    part = local(tensor)
    return tensor if part is tensor else {SHARD: part}


def _sharded(value: Any, parameter: Tensor) -> Any:
    """Return a parameter's state with its parts as DTensors, sharded as the parameter is."""

    def is_part(held: Any) -> bool:
        return isinstance(held, dict) and held.keys() == {SHARD}

    def whole(held: Any) -> Any:
        if not is_part(held):
            return held
        part, shape = held[SHARD], local(parameter).shape
        if part.shape != shape:
            raise ValueError(f"a shard has shape {tuple(part.shape)}, not {tuple(shape)}")
        return as_sharded(parameter, part)

    return tree_map(whole, value, is_leaf=is_part)


class BetweenSteps:
    """Copies of the optimizers' state for the gossip thread, while the main thread trains on.

    A chunk is copied only while no optimizer steps. A step that begins meanwhile waits for that one
    chunk (1 MB: about 0.2 ms), or for the description of the whole (some milliseconds, once for a
    joiner), which another thread makes: the gossip thread waits for neither. So every chunk that a
    joiner receives is of one step; if a moment is exchanged, part of its chunk may be from before
    and part from after the average that a boundary adds. Two chunks of a tensor, or two tensors,
    may be of different steps: that is harmless, as it is for the parameters. Numbers and small
    tensors are all of the step at which the transfer began.

    A GPU steps later than it is asked, and the main thread asks for the next step before this one
    is done. So each step leaves a mark, and nothing is read before it is past. At the end of a step
    for which someone waits, the main thread waits for the mark too: else the next step might always
    have begun when it is past. If no step follows, the GPU comes to the mark by itself.

    Optimizers change their state in ``step()`` alone. If the script loads another state into one
    meanwhile, the joiner gets the old one. If a step raises, its optimizer counts as stepping until
    its next step has ended: nothing is given meanwhile, and joiners ask others.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._mark = Device().mark()
        self._wake: Callable[[], None] = lambda: None
        self._described: Background[Offer] = Background()
        # Guards the two below; it is held while any of the state is read, and notified when a step
        # has ended. The mark is left within a step alone.
        self._guard = threading.Condition(threading.Lock())
        self._stepping: set[int] = set()
        self._is_awaited = False

    def attach(self, mark: Mark, wake: Callable[[], None]) -> None:
        """Set the mark to leave behind each step, and how to wake the gossip thread."""
        self._mark, self._wake, self._described.wake = mark, wake, wake

    def close(self) -> None:
        """Describe nothing more."""
        with self._guard:
            self._stepping.clear()
            self._guard.notify_all()
        self._described.close()

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy nothing until the step of this optimizer has ended."""
        with self._guard:
            self._stepping.add(id(optimizer))

    def ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on once no optimizer steps."""
        self._mark.leave()
        if self._is_awaited:
            self._mark.wait()
        with self._guard:
            self._stepping.discard(id(optimizer))
            self._guard.notify_all()
            is_awaited, self._is_awaited = self._is_awaited, False
        if is_awaited:
            self._wake()

    def offer(self, key: Hashable) -> Offer | None:
        """Describe the state for the request ``key``; None: not yet, ask again when woken."""
        return self._described(key, self._describe)

    def _describe(self) -> Offer:
        while True:
            self._is_awaited = True
            self._mark.wait()  # if no step follows, nobody else does
            with self._guard:
                self._guard.wait_for(lambda: not self._stepping)
                if not self._mark.is_past():
                    continue
                try:
                    layout, tensors = packing.pack(capture(self._optimizers))
                except RuntimeError as error:  # the script changes it at this moment
                    why = f"the optimizers' state cannot be read now: {error}"
                    raise ValueError(why) from error
                return Offer(layout, [tensor.view(torch.uint8) for tensor in tensors], self._copy)

    def _copy(self, source: Tensor, room: Tensor) -> bool:
        # The thread that holds the guard, or steps, wakes the gossip thread. It stays awaited: more
        # is likely to follow.
        self._is_awaited = True
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._stepping or not self._mark.is_past():
                return False
            room.copy_(source)
        finally:
            self._guard.release()
        return True


class Arriving:
    """The optimizers' state of another worker, on its way here, and of bounded size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._rooms: list[Tensor]
        self._state: Any = None

    def unfold(self, layout: bytes) -> list[Tensor]:
        """Make room for the tensors of the donor's layout, as bytes; ValueError refuses it."""
        self._rooms, self._num_bytes = [], 0
        self._state = packing.unpack(layout, self._room)
        return [room.view(torch.uint8) for room in self._rooms]

    def _room(self, tensor: packing.TensorLayout) -> Tensor:
        self._num_bytes += tensor.num_bytes
        if self._num_bytes > self._max_bytes:
            raise ValueError(
                f"its optimizers' state takes more than {self._max_bytes} bytes, the most that "
                "this worker's model would take: the optimizers differ"
            )
        room = torch.empty(math.prod(tensor.shape), dtype=tensor.dtype, device="cpu")
        self._rooms.append(room)
        return room

    def state(self) -> Any:
        """Return the state in the memory where it arrived; ValueError if it is poisoned."""
        refuse_poison(self._state)
        return self._state


def fetch_state(
    thread: GossipThread, loop: GossipLoop, peer: int, arriving: Arriving | None, timeout_s: float
) -> Any:
    """Take one worker's parameters and buffers; return its optimizers' state, or None without."""
    unfold = None if arriving is None else arriving.unfold
    ended: Future[Exception | None] = Future()
    fetch = partial(loop.transfers.fetch, peer, unfold, ended.set_result, timeout_s)
    thread.call(fetch).result()
    if (error := ended.result()) is not None:
        raise error
    try:
        return None if arriving is None else arriving.state()
    except ValueError as error:
        raise TurnedAwayError(f"worker {peer} cannot give its state: {error}") from error


def take_state(
    thread: GossipThread, loop: GossipLoop, state: State, network: Network, *, is_start: bool
) -> Any:
    """Take the parameters and buffers of a worker that has some; return its optimizers' state.

    At the start of a run all optimizers are fresh: their state is not taken, and None is returned.
    There each worker asks its parent in a binary tree under rank 0, so that no worker gives to all,
    and the ancestors of one that does not answer. Later it asks the nearest in rank first, so that
    joiners ask different donors.
    """
    rank, transfers = loop.protocol.rank, loop.transfers
    limit_s, patience_s = network.start_timeout_s, network.timeout_s
    num_bytes = sum(segment.x.nbytes for segment in state.segments)
    most_bytes = OTHER_TRAINING_BYTES + TRAINING_BYTES_PER_BYTE * num_bytes
    ancestors = [rank] if is_start else []
    while ancestors and ancestors[-1] > 0:
        ancestors.append((ancestors[-1] - 1) // 2)
    advanced, deadline_s = 0, time.monotonic() + limit_s
    reason = ""
    while True:
        live = set(thread.call(loop.protocol.membership.live).result()) - {rank}
        nearest = sorted(live.difference(ancestors), key=lambda each: (abs(each - rank), each))
        for donor in [*filter(live.__contains__, ancestors), *nearest]:
            try:
                arriving = None if is_start else Arriving(most_bytes)
                return fetch_state(thread, loop, donor, arriving, patience_s)
            except PeerLostError as error:
                thread.check()
                reason = str(error)
                is_turned_away = isinstance(error, TurnedAwayError)
                has_none_yet = isinstance(error, NoStateYetError)
            if is_start and has_none_yet:
                # It waits for its own parent, and ends if nothing comes to it: ask it again. One
                # that is no ancestor may wait for this worker.
                if donor in ancestors:
                    deadline_s, patience_s = time.monotonic() + limit_s, network.timeout_s
                break
            if is_start and is_turned_away:
                raise RendezvousError(f"worker {rank} cannot start: {reason}")
            logger.warning("worker %d asks another: %s", rank, reason)
            # Refusal after refusal in the middle of a transfer is no progress.
            if transfers.num_chunks_received > advanced and not is_turned_away:
                deadline_s = time.monotonic() + limit_s
            advanced = transfers.num_chunks_received
        if not live or time.monotonic() >= deadline_s:
            raise RendezvousError(
                f"worker {rank} could not join: no live worker gave it a state"
                f"{'; the last: ' if reason else ''}{reason}"
            )
        # The donor sends after its optimizer's step, which may take longer than the time-out.
        patience_s = min(2 * patience_s, limit_s)
        time.sleep(PAUSE_BETWEEN_ROUNDS_S)


def refuse_poison(state: Any) -> None:
    """Raise ValueError if a tensor that an optimizer keeps for a parameter is NaN or infinite.

    A NaN in a gradient spoils the momentum for good, and that of every worker that takes it over.
    Settings (``param_groups``) and numbers may be infinite, as a limit is.
    """
    for path, tensor in tree_flatten_with_path(state)[0]:
        place = keystr(path)
        if not isinstance(tensor, Tensor) or "['state']" not in place:
            continue
        parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        parts = parts.float() if parts.element_size() == 1 else parts
        if not is_finite(parts):
            raise ValueError(f"{place} holds NaN or infinity")


def restore(state: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give the optimizers a captured state; they own its tensors from now on.

    Every value comes back as it was captured, on its parameter's device. ``load_state_dict`` alone
    would cast the state's floats to the parameter's precision and break texts in it.
    """
    saved = state.get("optimizers") if isinstance(state, dict) else None
    if not isinstance(saved, list) or len(saved) != len(optimizers):
        held = f"{len(saved)} optimizers" if isinstance(saved, list) else "no optimizers"
        raise ValueError(f"the state is of {held}, and there are {len(optimizers)} here")
    for index, (optimizer, values) in enumerate(zip(optimizers, saved, strict=True)):
        try:
            _load(optimizer, values)
        except Exception as error:
            raise ValueError(
                f"the state does not fit optimizer {index}, a {type(optimizer).__name__}; make the "
                f"optimizer as it was: {type(error).__name__}: {error}"
            ) from error


def restore_groups(state: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give the optimizers back the learning rates and other settings of a state that fits.

    A new scheduler has set them to those with which a run begins.
    """
    for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
        for group, saved in zip(optimizer.param_groups, values["param_groups"], strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                elif key != "params":
                    group[key] = value


def _load(optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    names = [name for group in values["param_groups"] for name in group["params"]]
    by_name = dict(zip(names, parameters, strict=False))
    state = {name: _sharded(own, by_name.get(name, own)) for name, own in values["state"].items()}
    values = {**values, "state": state}
    before_of = {name: optimizer.state.get(name) for name in state if name not in by_name}
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(values)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        for key, value in group.items():
            if isinstance(value, Tensor) and isinstance(old.get(key), Tensor):
                group[key] = value.to(old[key].device)
    for name, saved in state.items():
        key = by_name.get(name, name)
        optimizer.state[key] = _as_saved(saved, before_of.get(name, optimizer.state[key]))


def _as_saved(saved: Any, loaded: Any) -> Any:
    """Return the saved values on the devices where the optimizer's own loading put them.

    That loading casts floats and breaks texts.
    """
    if isinstance(loaded, Tensor):
        return saved.to(loaded.device) if isinstance(saved, Tensor) else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return loaded | {key: _as_saved(each, loaded.get(key)) for key, each in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(saved)(map(_as_saved, saved, loaded))
    return saved
