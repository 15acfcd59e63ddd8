import json
import subprocess
import sys
from pathlib import Path

import pytest

from gossipdp.cli.main import main


def plan(**options):
    """The status of the command with these options."""
    words = [
        word
        for name, value in options.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return main(["plan", *words])


def test_the_table_and_the_verdict(capsys):
    assert plan(workers=64, graph="ring", comm_rate=1.0) == 0
    printed = capsys.readouterr().out
    for expected in ("ring (64 workers)", "207.673", "0.984375", "0.0349704", "7.26238", "14.5"):
        assert expected in printed
    assert "exchanges per unit time" in printed
    assert "A2CiD2 helps here: yes" in printed
    assert "Learning rate, as a multiple of all-reduce's" in printed


@pytest.mark.parametrize(("graph", "workers"), [("complete", 8), ("ring", 1)])
def test_where_it_does_not_help(capsys, graph, workers):
    assert plan(workers=workers, graph=graph) == 0
    assert "A2CiD2 helps here: no" in capsys.readouterr().out


def test_json(tmp_path):
    path = tmp_path / "plan.json"
    assert plan(workers=16, graph="ring", comm_rate=2.0, json=path) == 0
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


def test_an_edge_list_brings_its_own_number_of_workers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    edges = Path("[red].edges")
    edges.write_text("0 1\n1 2\n")
    assert plan(edge_list=edges) == 0
    assert "[red].edges" in capsys.readouterr().out


def test_where_the_file_cannot_be_written_nothing_is_searched(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gossipdp.graph.plan", None)
    for path in (tmp_path, tmp_path / "missing" / "plan.json"):
        assert plan(workers=4, json=path) == 2
        assert f"--json {path}" in capsys.readouterr().err


def test_where_writing_fails_the_figures_are_shown(capsys):
    assert plan(workers=4, json=Path("/dev/full")) == 2
    printed = capsys.readouterr()
    assert "A2CiD2 helps here" in printed.out
    assert "No space left" in printed.err


def network_plan(**others):
    given = {"workers": 8, "parameters": "2.5M", "step_ms": 100.0, "link_mbps": 1000.0}
    return plan(**(given | others))


def test_a_fast_network_sustains_the_rate_that_is_asked_for(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert network_plan(comm_rate=0.5, step_spread=0.2, json=path) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "8 workers, 10 MB" in printed
    assert "serves best" in printed
    assert "the network sustains" not in printed
    written = json.loads(path.read_text())["network"]
    assert written["conditions"]["model_bytes"] == 1e7
    assert written["exchange_s"] == pytest.approx(0.0805)
    assert written["training_s"] == pytest.approx(100.0)
    # 1000 steps of 14/8 * 80 ms + 14 * 0.5 ms, and more than a mean step for the slowest.
    assert 100.0 + 147.0 + 10.0 < written["all_reduce_s"] < 100.0 + 147.0 + 60.0
    assert written["all_reduce_overlapped_s"] == pytest.approx(147.0)
    # A bucket of 1 MiB, and the rest when the backward pass has ended.
    rest = 1 - 2**20 / 1e7
    slowest_s = written["all_reduce_s"] - 147.0
    rivals_s = written["rivals_s"]
    assert rivals_s["ddp"] == pytest.approx(slowest_s + 7 + 140 * rest)
    assert rivals_s["ddp_bf16"] == pytest.approx(slowest_s + 7 + 70 * rest)
    assert 100.0 + 147.0 / 16 < rivals_s["local_averaging"] < 115.0 + 147.0 / 16
    assert written["strongest_rival"] == "local_averaging"
    assert "Strongest rival: an average of all every 16 steps" in printed
    assert "average at every step: DDP, bfloat16 (its hook); gossip takes" in printed
    assert [each["name"] for each in written["graphs"]] == [
        "ring",
        "exponential",
        "torus",
        "complete",
    ]
    for each in written["graphs"]:
        assert each["achieved_comm_rate"] == pytest.approx(0.5, rel=0.15)
        per_worker = each["achieved_comm_rate"] * 1e8
        assert each["worker_bytes_per_s"] == pytest.approx(per_worker)
        assert each["link_bytes_per_s"] == pytest.approx(per_worker * 4 / each["num_edges"])


def test_where_links_are_fast_gossip_gains_no_time(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert network_plan(link_mbps=1e6, latency_ms=0.001, sync_every=1, json=path) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Strongest rival: DDP, bfloat16 (its hook); gossip gains no time over it" in printed
    assert json.loads(path.read_text())["network"]["strongest_rival"] == "ddp_bf16"


def test_adams_second_moment_counts_in_exchanges_and_not_in_the_all_reduce(tmp_path, capsys):
    written = []
    for optimizer in ("sgd", "adam"):
        path = tmp_path / f"{optimizer}.json"
        assert network_plan(optimizer=optimizer, comm_rate=0.5, json=path) == 0
        written.append(json.loads(path.read_text())["network"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "6% of a model more for Adam's second moment" in printed
    sgd, adam = written
    latency_s = 0.0005
    assert adam["exchange_s"] - latency_s == pytest.approx(1.0625 * (sgd["exchange_s"] - latency_s))
    assert adam["all_reduce_s"] == sgd["all_reduce_s"]
    for one, other in zip(sgd["graphs"], adam["graphs"], strict=True):
        bytes_per_exchange = [
            each["worker_bytes_per_s"] / each["achieved_comm_rate"] for each in (one, other)
        ]
        assert bytes_per_exchange[1] == pytest.approx(1.0625 * bytes_per_exchange[0])


@pytest.mark.parametrize(("workers", "comm_rate"), [(4, 0.1), (2, 0.003), (2, 1e-9)])
def test_how_many_exchanges_happen_to_be_asked_for_says_nothing_of_the_network(workers, comm_rate):
    from gossipdp.cli.plan_network import TrainingConditions, served_share
    from gossipdp.graph import build_graph

    conditions = TrainingConditions(model_bytes=4e6, step_s=0.1, bytes_per_s=1.25e9)
    graph = build_graph("ring", workers)
    assert served_share(graph, conditions, comm_rate, seed=1) == pytest.approx(1.0, abs=0.01)


def test_rare_exchanges_that_take_long_are_served_too():
    from gossipdp.cli.plan_network import TrainingConditions, served_share
    from gossipdp.graph import build_graph

    # An exchange takes 300 steps, and a worker is in one for 3 steps of 10.
    conditions = TrainingConditions(model_bytes=3e10, step_s=0.1, bytes_per_s=1e9)
    assert served_share(build_graph("ring", 8), conditions, 0.001, seed=0) > 0.95


def test_a_slow_network_sustains_less(tmp_path, capsys):
    path = tmp_path / "plan.json"
    options = {"graph": "star", "workers": 20, "parameters": None, "model_mb": 50.0}
    assert network_plan(**options, json=path, noise="drift") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "On star the network sustains" in printed
    assert "on graphs of 16 workers of the same kind" in printed
    written = json.loads(path.read_text())["network"]
    star, ring = written["graphs"][:2]
    # The centre alone takes part in every exchange of 4 steps: at most 1/4 of its budget of 1.
    assert star["nominal_comm_rate"] == pytest.approx(2 / 20)
    assert 0.8 / 40 < star["achieved_comm_rate"] <= 1.02 / 40
    assert 0.15 < ring["achieved_comm_rate"] <= 0.255
    assert written["recommended"] != "star"


def test_an_edge_list_on_a_network_and_the_same_seed_gives_the_same(tmp_path, capsys):
    edges = tmp_path / "path.edges"
    edges.write_text("0 1\n1 2\n2 3\n3 4\n")
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path in paths:
        assert network_plan(workers=None, edge_list=edges, step_spread=0.3, json=path) == 0
    assert "On edge list" not in capsys.readouterr().out
    first, second = (json.loads(path.read_text()) for path in paths)
    assert first == second
    own = first["network"]["graphs"][0]
    assert (own["name"], own["num_edges"]) == ("edge list", 4)
    assert own["nominal_comm_rate"] == pytest.approx(0.8)


def test_a_plan_without_a_network_imports_neither_torch_nor_the_simulator():
    code = (
        "import sys; from gossipdp.cli.plan import PlanArguments as P, run;"
        "assert run(P(workers=4)) == 0;"
        "assert not {'torch', 'scipy', 'gossipdp.simulate'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
