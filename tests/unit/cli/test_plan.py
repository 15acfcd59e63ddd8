"""``gossipdp plan``, and ``gossipdp tls-init``."""

import json
from pathlib import Path

import pytest

from gossipdp.cli.main import main
from gossipdp.cli.plan import WRITTEN
from gossipdp.links.tls import Tls, tls_files


def plan(words: str) -> int:
    return main(["plan", *words.split()])


def test_the_table_and_the_verdict(capsys):
    assert plan("--workers 64 --graph ring") == 0
    printed = capsys.readouterr().out
    for expected in ("ring (64 workers)", "207.673", "0.984375", "0.0349704", "7.26238", "14.5"):
        assert expected in printed
    assert "A2CiD2 helps here: yes" in printed


@pytest.mark.parametrize(("graph", "workers"), [("complete", 8), ("ring", 1)])
def test_where_it_does_not_help(capsys, graph, workers):
    assert plan(f"--workers {workers} --graph {graph}") == 0
    assert "A2CiD2 helps here: no" in capsys.readouterr().out


def test_json(tmp_path):
    path = tmp_path / "plan.json"
    assert plan(f"--graph ring --workers 16 --comm-rate 2 --json {path}") == 0
    written = json.loads(path.read_text())
    assert written.keys() == {*WRITTEN, "edges"}
    assert (written["exchanges_per_unit_time"], written["edges"]) == (pytest.approx(16.0), 16)
    assert written["chi2"] == pytest.approx(15 / 32)


def test_an_edge_list_brings_its_own_number_of_workers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("[red].edges").write_text("0 1\n1 2\n")
    assert plan("--edge-list [red].edges") == 0
    assert "[red].edges" in capsys.readouterr().out


def test_where_writing_fails_the_figures_are_shown(capsys):
    assert plan("--workers 4 --json /dev/full") == 2
    printed = capsys.readouterr()
    assert "A2CiD2 helps here" in printed.out
    assert "No space left" in printed.err


def test_tls_init_makes_a_pair_that_opens_links_and_overwrites_none(tmp_path, capsys):
    assert main(["tls-init", str(tmp_path / "tls")]) == 0
    Tls(tls_files(tmp_path / "tls"))
    assert f"gossipdp run -n 4 --tls {tmp_path / 'tls'} train.py" in capsys.readouterr().out
    assert main(["tls-init", str(tmp_path / "tls")]) == 2
    assert "cert.pem is there already" in capsys.readouterr().err
