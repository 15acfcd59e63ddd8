import json
import subprocess
import sys

import pytest

from gossipdp.cli.plan import PlanArguments, run


def test_the_table_and_the_verdict(capsys):
    assert run(PlanArguments(workers=64, graph="ring", comm_rate=1.0)) == 0
    printed = capsys.readouterr().out
    for expected in ("ring (64 workers)", "207.673", "0.984375", "0.0349704", "7.26238", "14.5"):
        assert expected in printed
    assert "exchanges per unit time" in printed
    assert "A2CiD2 helps here: yes" in printed


@pytest.mark.parametrize(("graph", "workers"), [("complete", 8), ("ring", 1)])
def test_where_it_does_not_help(capsys, graph, workers):
    assert run(PlanArguments(workers=workers, graph=graph)) == 0
    assert "A2CiD2 helps here: no" in capsys.readouterr().out


def test_json(tmp_path):
    path = tmp_path / "plan.json"
    assert run(PlanArguments(workers=16, graph="ring", comm_rate=2.0, json=path)) == 0
    written = json.loads(path.read_text())
    assert written.keys() == {
        "chi1",
        "chi2",
        "eta",
        "alpha_tilde",
        "exchanges_per_unit_time",
        "edges",
    }
    assert written["exchanges_per_unit_time"] == pytest.approx(16.0)
    assert written["edges"] == 16
    assert written["chi2"] == pytest.approx(15 / 32)


def test_an_edge_list_brings_its_own_number_of_workers(tmp_path, capsys):
    edges = tmp_path / "[red].edges"
    edges.write_text("0 1\n1 2\n")
    assert run(PlanArguments(edge_list=edges)) == 0
    assert "[red].edges" in capsys.readouterr().out
    assert run(PlanArguments(edge_list=edges, workers=4)) == 2
    assert "3 nodes, but there are 4 workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass --workers"),
        ({"workers": 4, "graph": "rign"}, "did you mean 'ring'"),
        ({"workers": 4, "comm_rate": 0.0}, "comm rate 0.0 is not"),
        ({"workers": 0}, "at least 1"),
        ({"workers": 6, "graph": "hypercube"}, "power of two"),
    ],
)
def test_bad_input_is_one_line_and_not_zero(capsys, arguments, message):
    assert run(PlanArguments(**arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gossipdp plan: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_files_that_cannot_be_used(tmp_path, capsys):
    missing = tmp_path / "missing"
    assert run(PlanArguments(edge_list=missing)) == 2
    assert "missing" in capsys.readouterr().err
    assert run(PlanArguments(workers=4, json=missing / "plan.json")) == 2
    assert "plan.json" in capsys.readouterr().err
    assert run(PlanArguments(workers=4, graph="torus", edge_list=missing)) == 2
    assert "pass one of them" in capsys.readouterr().err


def test_importing_the_command_imports_nothing_heavy():
    heavy = "('torch', 'networkx', 'scipy', 'numpy', 'rich')"
    code = f"import sys, gossipdp.cli.plan; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"
