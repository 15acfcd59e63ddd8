import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import tyro

from gossipdp.cli.main import main
from gossipdp_lab.simulate import command, study
from gossipdp_lab.simulate.scenario import ConstantTime, Link, LinkModel, SlowedTime
from gossipdp_lab.simulate.study import simulate_all
from gossipdp_lab.simulate.trace import TAIL_LOWEST, lowest_share
from gossipdp_lab.tasks.digits import SGD


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a directory of its own, where figures go, and in this process alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "WORTH_PROCESSES_S", math.inf)  # others would import torch anew
    return tmp_path


def arguments_of(words: str) -> command.SimulateArguments:
    return tyro.cli(command.SimulateArguments, args=words.split())


def runs_of(words: str) -> list[command.Run]:
    return command.make_runs(arguments_of(words))


def results(words: str) -> tuple[Any, str]:
    """Return the JSON and the notes of a study, without pictures."""
    runs = runs_of(words)
    traces = simulate_all([run.job for run in runs], processes=1)
    found = list(zip(runs, traces, strict=True))
    said = "\n".join(command.notes(found))
    return command.as_json(arguments_of(words), found), said


def test_a_file_where_the_figures_go(elsewhere, capsys):
    (elsewhere / "runs").write_text("")
    assert main(["simulate", "--workers", "4"]) == 2
    assert "runs: go to another directory" in capsys.readouterr().err


def test_runs_are_as_long_as_theory_says_or_as_is_affordable():
    ours, gossip = runs_of("--graph ring --workers 64")
    assert (ours.job.method, gossip.job.method) == ("a2cid2", "gossip")
    # Gossip needs longer, in proportion to theory's rates.
    assert gossip.job.scenario.num_steps > 10 * ours.job.scenario.num_steps
    given = arguments_of("--graph ring"), runs_of("--graph ring --workers 512")
    said = "\n".join(command.opening(*given))
    assert "gossip: 15,258 steps at most, since the" in said
    assert "--steps sets another length" in said
    for words in ("--graph ring --methods a2cid2", "--methods allreduce", "--graph star"):
        run = runs_of(f"{words} --workers 8 --seed 1")[-1]
        (trace,) = simulate_all([run.job], processes=1)
        assert lowest_share(trace.column("consensus_distance")) < TAIL_LOWEST
        assert run.needed == run.job.scenario.num_steps
        if run.job.method != "allreduce":  # and not many times too long
            assert trace.records[-1].time_s > 0.2 * run.needed * trace.unit_s


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--fidelity links --step-ms 20", {"compute_time": ConstantTime(0.02)}),
        (
            "--fidelity links --slow-worker 2:4,3:1.5 --slow-worker 0:2",
            {"compute_time": SlowedTime(ConstantTime(0.1), {2: 4.0, 3: 1.5, 0: 2.0})},
        ),
        ("--fidelity links --model-mb 4 --seed 7", {"model_bytes": 4e6, "seed": 7}),
        ("--fidelity links --latency-ms 2 --link-mbps 80", {"links": LinkModel(Link(0.002, 1e7))}),
        ("--workload digits", {"optimizer": SGD, "num_steps": 100.0}),
    ],
)
def test_options_become_a_scenario(words, expected):
    scenario = runs_of(words)[0].job.scenario
    assert {name: getattr(scenario, name) for name in expected} == expected


def test_the_timeline_of_the_docs_idles_as_they_say():
    page = (Path(__file__).parents[4] / "docs/simulator.md").read_text()
    (words,) = re.findall(r"^    gossipdp simulate (.*--timeline)$", page, re.M)
    traces = simulate_all(command.timeline_jobs(runs_of(words)), processes=1)
    gossip, allreduce = (trace.records[-1].idle_share for trace in traces)
    assert gossip == 0.0
    assert allreduce == pytest.approx(0.59, abs=0.005)


def test_consensus_on_a_ring(elsewhere):
    """The docs show what it prints, which test_docs holds."""
    words = "simulate --graph ring --workers 16 --json results.json --timeline"
    assert main(words.split()) == 0
    text = (elsewhere / "results.json").read_text()
    written = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    # The design's table, with Poisson edges.
    expected = ("a2cid2", 0.234), ("gossip", 0.078)
    for run, (method, decay) in zip(written["runs"], expected, strict=True):
        assert (run["method"], run["graph"], run["comm_rate"]) == (method, "ring", 1.0)
        assert run["decay_per_exchange"] == pytest.approx(decay, rel=0.2)
        assert run["achieved_comm_rate"] == pytest.approx(1.0, rel=0.1)
        length = len(run["time_s"])
        for name in ("consensus_distance", "exchanges", "gradient_steps", "idle_share", "loss"):
            assert len(run[name]) == length
        assert run["consensus_distance"][-1] < 1e-24 * run["consensus_distance"][0]
        assert set(run["loss"]) == {None}
    assert written["configuration"]["workers"] == 16
    assert written["version"]
    figure = elsewhere / "runs" / "simulate-consensus-ring-16" / "figure.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.with_name("timeline.png").is_file()


def test_several_graphs_and_rates():
    words = "--graph ring,star --comm-rate 1,2 --workers 6 --methods gossip,allreduce"
    words += " --workload digits --steps 10"
    written, said = results(words)
    assert [run.label for run in runs_of(words)] == [
        f"{graph} r={rate} {method}"
        for graph in ("ring", "star")
        for rate in (1, 2)
        for method in ("gossip", "allreduce")
    ]
    for run in written["runs"]:
        assert run["loss"][-1] < run["loss"][0]
        assert (run["idle_share"][-1] > 0) == (run["method"] == "allreduce")
    assert "at fidelity ideal links cost only allreduce time;" in said


def test_a_run_that_diverges():
    (run,) = runs_of("--workload digits --workers 4 --methods gossip --steps 5")
    (trace,) = simulate_all([run.job], processes=1)
    trace.records[-1] = trace.records[-1]._replace(consensus_distance=math.inf, loss=math.inf)
    diverged = [(run, trace)]
    assert "diverged" in list(command.table(diverged).columns[1].cells)
    written = command.as_json(arguments_of("--workload digits"), diverged)
    assert written["runs"][0]["loss"][-1] == math.inf  # null in the file


def test_more_steps_do_not_help_one_worker():
    _, said = results("--workers 1 --steps 50")
    assert "more steps" not in said
    _, said = results("--graph ring --steps 10 --methods gossip")
    assert "too little for its decay: let it run for more steps" in said
