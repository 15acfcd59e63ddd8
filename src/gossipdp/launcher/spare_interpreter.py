"""The program of a spare interpreter (:mod:`.spares`): imports torch, waits, becomes a worker.

It is run by its path, with the words of a worker's command after ``python``. Its input says which
variables the worker has; without any it ends.
"""

import json
import os
import runpy
import sys
from contextlib import suppress


def main() -> None:
    words = sys.argv[1:]
    is_module = words[0] == "-m"
    if not sys.flags.safe_path:
        # In place of this file's directory, what ``python`` would have there for these words.
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    import_ahead()
    message = sys.stdin.buffer.read()
    if not message:
        return
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    changes = json.loads(message)
    for name in changes["removed"]:
        os.environ.pop(name, None)
    os.environ.update(changes["set"])
    if is_module:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(os.path.join(os.getcwd(), words[0]), run_name="__main__")


def import_ahead() -> None:
    """Import what a training script imports; the first optimizer imports ``torch._dynamo``."""
    with suppress(Exception):  # the script will fail in the same way, and say so
        import torch

        from gossipdp import GossipDataParallel  # noqa: F401

        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)


if __name__ == "__main__":
    main()
