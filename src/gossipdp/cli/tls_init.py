"""``gossipdp tls-init``: the certificate and the key of a run that crosses a shared network."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class TlsInitArguments:
    """Make one certificate and its key, with which all workers of a run protect their links.

    Writes cert.pem and key.pem, valid for a year. Copy the directory to every machine of the run
    and start the workers with --tls. Whoever holds the key can take part in the run.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """Where to write them; made if it is not there. Nothing is overwritten."""


def run(arguments: TlsInitArguments) -> int:
    """Run ``gossipdp tls-init``; returns the exit code."""
    from gossipdp.links.tls import make_tls_files

    files = make_tls_files(arguments.directory)
    sys.stdout.write(
        f"wrote {files.cert} and {files.key}\n"
        "Copy both to every machine of the run; keep the key readable by you alone. Then:\n"
        f"    gossipdp run -n 4 --tls {arguments.directory} train.py\n"
    )
    return 0
