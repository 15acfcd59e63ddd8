"""A forked child keeps none of our descriptors.

A DataLoader worker is a fork of the training process and holds every socket open at the moment
of the fork. When the parent is then killed, the kernel sends no end of stream until the child dies
too, and peers notice late. So in every forked child the descriptors are closed at once: closed,
never shut down, since a shutdown would end the parent's connections as well.

The race: a fork between ``accept()`` (or ``socket()``) and the moment its owner lists the new
descriptor, or between the moment an owner drops one and ``close()``, would leave the child with a
descriptor that nobody names. It cannot happen: owners open and close descriptors under
:data:`descriptors_guard`, and a fork waits for that guard. The calls made under it never block.
The guard is re-entrant, so that a signal handler that forks does not wait for its own thread; the
child takes no lock, it only lets go of the guard that its parent took for it.
"""

import abc
import contextlib
import os
import threading
import weakref

descriptors_guard = threading.RLock()


class DescriptorOwner(abc.ABC):
    """Something that holds descriptors which a forked child must not keep."""

    @abc.abstractmethod
    def close_in_child(self) -> None:
        """Close every descriptor by number, ignoring errors, and become inert. Takes no lock."""


_owners: weakref.WeakSet[DescriptorOwner] = weakref.WeakSet()


def register(owner: DescriptorOwner) -> None:
    """Close ``owner``'s descriptors in every child forked from now on, while it lives."""
    with descriptors_guard:
        _owners.add(owner)


def close_descriptor(number: int) -> None:
    """Close a descriptor by number; one that is not open is no error."""
    with contextlib.suppress(OSError):
        os.close(number)


def _after_fork_in_child() -> None:
    try:
        for owner in list(_owners):
            owner.close_in_child()
    finally:
        descriptors_guard.release()


os.register_at_fork(
    before=descriptors_guard.acquire,
    after_in_parent=descriptors_guard.release,
    after_in_child=_after_fork_in_child,
)
