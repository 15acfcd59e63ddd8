"""``Spares``: interpreters that have imported torch, for workers that are started again.

A new interpreter needs seconds for the imports of a training script, and the cores that the other
workers use. A spare one (:mod:`.spare_interpreter`) has them behind it. It gets a worker's
variables by its standard input, and then runs the script as ``python SCRIPT`` would.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from gossipdp.launcher.local import ScriptWorker
from gossipdp.launcher.spare_interpreter import PROGRAM
from gossipdp.launcher.supervisor import Supervisor


class Spares:
    """The spare interpreters of one script. The supervisor's loop alone calls its methods.

    Args:
        script: the command of a worker, after ``python``: a file, or -m and a module.
        variables: the environment of a spare; that of a worker may differ in a little.
        number: how many are kept; none of a script that is no file of Python.
        say: shows a line.
    """

    def __init__(
        self,
        script: Sequence[str],
        variables: Mapping[str, str],
        number: int,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        is_python = script[0] == "-m" or script[0].endswith(".py")
        self._script, self._variables, self._say = list(script), dict(variables), say
        self._number = number if is_python else 0
        self._waiting: list[ScriptWorker] = []

    def start(self, variables: Mapping[str, str]) -> ScriptWorker:
        """Return a worker with this environment: a spare one, or a new one if there is none."""
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.poll() is None and spare.tell(self._message(variables)):
                return spare
            spare.discard()
        return ScriptWorker([sys.executable, *self._script], variables)

    def follow(self, supervisor: Supervisor) -> None:
        """Keep spares while a restart may come: started when all train, ended when none can."""
        if not supervisor.may_restart:
            self.close()
        elif supervisor.all_train:
            self.prepare()

    def prepare(self) -> None:
        """Start the spares that are missing; keep none once one has died or cannot be started."""
        if any(spare.poll() is not None for spare in self._waiting):
            self._give_up("it died")
        while len(self._waiting) < self._number:
            command = [sys.executable, "-c", PROGRAM, *self._script]
            try:
                spare = ScriptWorker(command, self._variables, stdin=subprocess.PIPE)
            except Exception as error:  # no process or descriptor left: the workers are healthy
                self._give_up(f"{type(error).__name__}: {error}")
            else:
                self._waiting.append(spare)

    def close(self) -> None:
        """End those that wait."""
        while self._waiting:
            self._waiting.pop().discard()

    def _give_up(self, reason: str) -> None:
        self.close()
        self._number = 0
        self._say(f"no spare interpreter is kept any more: {reason}")

    def _message(self, variables: Mapping[str, str]) -> bytes:
        changes = {
            "set": dict(variables.items() - self._variables.items()),
            "removed": list(self._variables.keys() - variables.keys()),
        }
        return json.dumps(changes).encode()
