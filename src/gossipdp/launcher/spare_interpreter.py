"""The program of a spare interpreter (see :mod:`.local`): imports torch, waits, becomes a worker.

``python -c PROGRAM WORDS``: WORDS are what follows ``python`` in a worker's command. The worker's
own variables arrive on standard input; if that ends empty, the process ends.
"""

import builtins
import gc
import io
import json
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader

PROGRAM = "from gossipdp.launcher.spare_interpreter import main; main()"


def main() -> None:
    """Wait, and become a worker."""
    words = sys.argv[1:]
    is_module = words[0] == "-m"
    if not sys.flags.safe_path:
        # In place of the present directory what ``python`` would have there for these words.
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    has_imported = import_ahead()
    gc.freeze()  # a collection over what torch imports takes 0.3 s
    message = sys.stdin.buffer.read()
    if not message:
        return
    os.environ.update(json.loads(message))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if not has_imported:  # an import that failed half-way may fail otherwise the next time
        os.execv(sys.executable, [sys.executable, *words])
    sys.orig_argv = [sys.orig_argv[0], *words]
    variables = sys.modules["__main__"].__dict__
    variables.clear()
    variables |= {"__name__": "__main__", "__builtins__": builtins}
    if sys.version_info < (3, 14):
        variables["__annotations__"] = {}
    variables |= dict.fromkeys(("__doc__", "__package__", "__spec__", "__loader__", "__cached__"))
    if is_module:
        sys.argv = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        sys.argv = words
        path = os.path.join(os.getcwd(), words[0])
        variables |= {"__file__": path, "__loader__": SourceFileLoader("__main__", path)}
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
        exec(code, variables)


def import_ahead() -> bool:
    """Import what a training script imports, and return whether that was possible.

    The first optimizer imports ``torch._dynamo``. What the imports write is lost: a script may not
    want it, and this process may never become one.
    """
    kept = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        import torch

        from gossipdp import GossipDataParallel  # noqa: F401

        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        return True
    except Exception:
        return False
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
