"""SIGTERM as an exception in the main thread, so that a worker ends in good order.

Launchers send SIGTERM to the workers that they end, the kernel does when ``gossipdp run`` dies,
and batch systems do ahead of time. By default it kills at once: no ``finally``, no ``atexit``, no
last checkpoint. From the signal on a worker has 1.5 s (2 s when its launcher died) before SIGKILL.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import NoReturn


def exit_on_sigterm() -> bool:
    """From now on SIGTERM raises ``SystemExit(143)`` in the main thread.

    A second one while the first unwinds the stack is ignored, so that it does not break into what
    is being saved; SIGKILL follows if that takes too long. A handler of the user's stays.

    Returns:
        Whether it was installed: not outside the main thread, nor where a handler was already.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return False

    def leave(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    return True
