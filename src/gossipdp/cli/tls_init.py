"""``gossipdp tls-init``: the certificate and the key of a run that crosses a shared network."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class TlsInitArguments:
    """Make a certificate and its key, so that all links use TLS.

    It writes cert.pem and key.pem. Copy the directory to every machine of the run and start the
    workers with --tls. Everyone who has the key can take part in the run.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory to write them to. It is made if it does not exist; no file is overwritten."""


def run(arguments: TlsInitArguments) -> int:
    from gossipdp.links.tls import CERT, KEY, make_tls_files

    directory = arguments.directory
    make_tls_files(directory)
    sys.stdout.write(
        f"wrote {directory / CERT} and {directory / KEY}\n"
        "Copy both to every machine of the run; keep the key readable by you alone. Then:\n"
        f"    gossipdp run -n 4 --tls {directory} train.py\n"
    )
    return 0
