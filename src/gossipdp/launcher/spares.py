"""``Spares``: interpreters that have imported torch, for workers that are started again.

A new interpreter needs seconds for the imports of a training script, and the cores that the other
workers use. A spare one (:mod:`.spare_interpreter`) has them behind it. It gets a worker's
variables by its standard input, and then runs the script as ``python SCRIPT`` would.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gossipdp.launcher.local import ScriptWorker

PROGRAM = Path(__file__).with_name("spare_interpreter.py")


class Spares:
    """The spare interpreters of one script. The supervisor's loop alone calls its methods.

    Args:
        script: the command of a worker, after ``python``.
        variables: the environment of a spare; those of a worker may differ in a few.
        number: how many are kept.
    """

    def __init__(self, script: Sequence[str], variables: Mapping[str, str], number: int) -> None:
        self._script, self._variables, self._number = list(script), dict(variables), number
        self._waiting: list[ScriptWorker] = []

    def start(self, variables: Mapping[str, str]) -> ScriptWorker:
        """Return a worker with this environment: a spare one, or a new one if there is none."""
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.poll() is None and spare.tell(self._message(variables)):
                return spare
            spare.discard()
        return ScriptWorker([sys.executable, *self._script], variables)

    def prepare(self) -> None:
        """Start the spares that are missing; none any more if one has died by itself."""
        if any(spare.poll() is not None for spare in self._waiting):
            self.close()
            self._number = 0
        while len(self._waiting) < self._number:
            command = [sys.executable, str(PROGRAM), *self._script]
            self._waiting.append(ScriptWorker(command, self._variables, stdin=subprocess.PIPE))

    def close(self) -> None:
        """End those that wait."""
        while self._waiting:
            self._waiting.pop().discard()

    def _message(self, variables: Mapping[str, str]) -> bytes:
        """Return what turns the environment of a spare into this one."""
        changes = {
            "set": dict(variables.items() - self._variables.items()),
            "removed": list(self._variables.keys() - variables.keys()),
        }
        return json.dumps(changes).encode()
