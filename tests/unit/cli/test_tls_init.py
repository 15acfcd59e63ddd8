"""``gossipdp tls-init``: files that workers can use, and nothing overwritten."""

from pathlib import Path

import pytest

from gossipdp.cli.main import main
from gossipdp.links.tls import Tls, tls_files


def test_the_command_makes_a_pair_that_opens_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tls-init", str(tmp_path / "tls")]) == 0
    Tls(tls_files(tmp_path / "tls"))
    shown = capsys.readouterr().out
    assert f"gossipdp run -n 4 --tls {tmp_path / 'tls'} train.py" in shown
    assert main(["tls-init", str(tmp_path / "tls")]) == 2
    assert "cert.pem is there already" in capsys.readouterr().err
