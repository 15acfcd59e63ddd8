"""A script run as ``__main__`` by a process that has begun as something else.

``run_words(["train.py", "--lr", "0.1"])`` leaves ``sys.argv``, ``sys.path[0]``, ``__main__``, the
traceback of an error and the exit code as ``python train.py --lr 0.1`` does, and so for ``-m`` and
``-c``.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import io
import os
import pkgutil
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn


def import_directory(words: Sequence[str]) -> str:
    """What an interpreter puts first on ``sys.path`` for these words."""
    if words[0] == "-c":
        return ""
    if words[0] == "-m":
        return os.getcwd()
    path = os.path.realpath(words[0])
    return path if _holds_main(path) else os.path.dirname(path)


def run_words(words: Sequence[str]) -> NoReturn:
    """Run what follows ``python`` on a command line, and leave by SystemExit.

    ``sys.path`` must be without a first entry of this kind; Python's options other than -m and -c
    are not understood.
    """
    if not sys.flags.safe_path:
        sys.path.insert(0, import_directory(words))
    sys.argv[:] = words if words[0] not in ("-c", "-m") else [words[0], *words[2:]]
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    try:
        if words[0] == "-m":
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # as `python -m` does
        elif words[0] == "-c":
            exec(compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        elif _holds_main(os.path.realpath(words[0])):
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            path = os.path.join(os.getcwd(), words[0])
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
            exec(_code_of(path), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _die_of(error)
    raise SystemExit(0)


def _holds_main(path: str) -> bool:
    """Whether ``path`` is a directory or archive whose ``__main__`` is run."""
    if os.path.isdir(path):
        return True
    return pkgutil.get_importer(path) is not None and not path.endswith((".py", ".pyc"))


def _code_of(path: str) -> CodeType:
    with io.open_code(path) as file:
        code = pkgutil.read_code(file) if path.endswith(".pyc") else None
    if isinstance(code, CodeType):
        return code
    with io.open_code(path) as file:
        source = file.read()
    code = compile(source, path, "exec", dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def _die_of(error: BaseException) -> NoReturn:
    """Show ``error`` without the frames of this module, and end as the interpreter would."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    _show(error, trace)
    if isinstance(error, KeyboardInterrupt):
        # Whoever waits for this process is to see that SIGINT ended it.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1) from None


def _show(error: BaseException, trace: TracebackType | None) -> None:
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)
    sys.stderr.flush()
