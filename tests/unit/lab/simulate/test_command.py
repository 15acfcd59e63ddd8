"""``gossipdp simulate``: what it refuses, what it makes of its options, what it writes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from gossipdp.cli.main import main
from gossipdp.dynamics.outer import OuterStep
from gossipdp_lab.simulate.command import SimulateArguments, run
from gossipdp_lab.simulate.command_results import command
from gossipdp_lab.simulate.command_study import (
    load_objective,
    make_study,
    parse_seeds,
    read_step_times,
)
from gossipdp_lab.simulate.figures import ACTIVITY_COLOURS, draw_timeline
from gossipdp_lab.simulate.optimizers import AdamW, Sgd
from gossipdp_lab.simulate.scenario import (
    ConstantTime,
    Link,
    LognormalTime,
    MeasuredTime,
    SlowedTime,
)
from gossipdp_lab.simulate.study import simulate_all

DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a directory of its own, where figures go by default."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(words: str) -> int:
    return main(["simulate", *words.split()])


def strict(path: Path) -> Any:
    def fail(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=fail)


# What is refused.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--methods telepathy", "no method 'telepathy'; choose among a2cid2, gossip"),
        ("--methods a2cid2,,gossip", "--methods is 'a2cid2,,gossip'"),
        ("--methods gossip,gossip", "each may stand there once"),
        ("--comm-rate 1,1.0", "each may stand there once"),
        ("--comm-rate 0", "--comm-rate is 0; it must be a positive number"),
        ("--comm-rate fast", "--comm-rate is 'fast'; it must be a number"),
        ("--workload juggling", "no workload 'juggling'; choose one of consensus"),
        ("--workload nowhere:make", "no module 'nowhere'"),
        ("--workload missing.py:make", "no file"),
        ("--graph circle", "circle"),
        ("--graph hypercube --workers 7", "hypercube"),
        ("--workers 0", "--workers is 0"),
        ("--steps 0", "--steps is 0"),
        ("--steps nan", "--steps is nan"),
        ("--seeds some", "--seeds is 'some'"),
        ("--processes 0", "--processes is 0"),
        ("--eta-factor 0", "eta_factor is 0"),
        ("--fidelity links --slow-worker 16:2", "no rank 16 among 16 workers"),
        ("--fidelity links --slow-worker 1:2,1:3", "rank 1 is given twice"),
        ("--fidelity links --slow-worker 1", "write RANK:FACTOR"),
        ("--fidelity links --slow-worker 1:-2", "--slow-worker 1:-2 is -2"),
        ("--slow-worker 1:2", "--slow-worker plays no part here"),
        ("--step-times times.txt", "--step-times times.txt cannot be read: No such file"),
        ("--step-times . --step-ms 3", "leave out --step-ms"),
        ("--step-ms 0", "--step-ms is 0; it must be a positive number"),
        ("--workload quadratic --step-spread 10", "--step-spread is 10, but must be from 0 to 3"),
        ("--link-mbps 10", "--link-mbps plays no part here"),
        ("--neighbour-policy poisson --methods allreduce", "--neighbour-policy plays no part"),
        ("--fidelity links --neighbour-policy rude", "no neighbour policy 'rude'"),
        ("--fidelity links --slow-link 0-5:1", "ring has no edge between these two"),
        ("--fidelity links --slow-link 0-16:1", "ranks 0 and 16 have no link"),
        ("--fidelity links --slow-link 0:1", "write I-J:MBPS"),
        ("--fidelity links --slow-link 0-1:1,1-0:2", "the link of 0 and 1 is given twice"),
        ("--fidelity links --model-mb -1", "--model-mb is -1"),
        ("--learning-rate 1", "--learning-rate plays no part in --workload consensus"),
        ("--sync-every 4", "--sync-every plays no part with these methods, but with diloco"),
        ("--outer-lr 1 --methods allreduce", "--outer-lr plays no part with these methods"),
        ("--workload quadratic --exchange-moments exp_avg", "write NAME:PERIOD, such as"),
        ("--workload quadratic --exchange-moments a:1,a:2", "a is given twice"),
        ("--workload quadratic --methods diloco --sync-every 0", "sync_every is 0"),
        ("--methods diloco", "method diloco averages what gradient steps did"),
        ("--workload quadratic --disjoint", "--disjoint plays no part in --workload quadratic"),
        ("--workload digits --noise 1", "--noise plays no part in --workload digits"),
        ("--workload quadratic --optimizer adamw --momentum 0.9", "--momentum is sgd's"),
        ("--workload quadratic --curvature 2:1", "write LEAST:LARGEST"),
        ("--workload digits --disjoint --dirichlet 1", "exclude each other"),
        ("--json missing/results.json", "the directory to write it to does not exist"),
        ("--json .", "cannot be written"),
        ("--figure figure.pdf", "let its name end in .png"),
        ("--figure missing/figure.png", "the directory to write it to does not exist"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: str, message: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(elsewhere.iterdir()) == []


def test_a_file_where_the_figures_go(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "runs").write_text("")
    assert simulate("--workers 4") == 2
    assert "runs: pass --figure PATH" in capsys.readouterr().err


def test_step_times_that_are_none(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = elsewhere / "times.txt"
    for text, message in (
        ("# nothing\n\n", "there is no time in it"),
        ("0.1\nsoon\n", "line 2 is 'soon'; it must be a number"),
        ("0.1\n0\n", "line 2 is 0; it must be a positive number"),
    ):
        times.write_text(text)
        assert simulate("--step-times times.txt") == 2
        assert message in capsys.readouterr().err
    times.write_bytes(b"\xff\xfe0")
    assert simulate("--step-times times.txt") == 2
    assert "times.txt is not UTF-8 text" in capsys.readouterr().err


def test_step_times_that_begin_with_a_byte_order_mark(elsewhere: Path) -> None:
    times = elsewhere / "times.txt"
    times.write_text("0.1\n0.3\n", "utf-8-sig")
    assert read_step_times(times) == (0.1, 0.3)


# What options come to.


def test_what_is_simulated_by_default() -> None:
    study = make_study(SimulateArguments())
    assert study.methods == ["a2cid2", "gossip"]
    assert study.seeds == [0, 1, 2]
    (case,) = study.cases
    assert case.scenario.compute_time == ConstantTime(0.1)
    assert case.scenario.links.every == Link(0.0005, math.inf)
    assert case.scenario.neighbour_policy == "fresh"
    assert case.scenario.model_bytes is None
    jobs = study.jobs()
    assert [(job.method, job.scenario.seed) for job in jobs] == [
        (method, seed) for method in ("a2cid2", "gossip") for seed in (0, 1, 2)
    ]
    # Gossip needs longer, in proportion to theory's rates.
    assert jobs[3].scenario.num_steps > 3 * jobs[0].scenario.num_steps


def test_compute_options(elsewhere: Path) -> None:
    (elsewhere / "times.txt").write_text("0.1  # the first\n\n0.3\n")
    links = SimulateArguments(fidelity="links")

    def compute_time(**options: Any) -> Any:
        arguments = replace(links, **options)
        return make_study(arguments).cases[0].scenario.compute_time

    assert compute_time(step_ms=20.0) == ConstantTime(0.02)
    assert compute_time(step_spread=0.5) == LognormalTime(0.1, 0.5)
    assert compute_time(step_times=Path("times.txt")) == MeasuredTime((0.1, 0.3))
    assert compute_time(slow_worker=("2:4,3:1.5", "0:2")) == SlowedTime(
        ConstantTime(0.1), {2: 4.0, 3: 1.5, 0: 2.0}
    )


def test_network_options() -> None:
    arguments = SimulateArguments(
        fidelity="links",
        latency_ms=2.0,
        link_mbps=80.0,
        jitter=0.1,
        slow_link=("1-0:8", "2-3:8:50"),
        model_mb=4.0,
        neighbour_policy="poisson",
    )
    scenario = make_study(arguments).cases[0].scenario
    assert scenario.links.every == Link(0.002, 1e7)
    assert scenario.links.link(0, 1) == Link(0.002, 1e6)
    assert scenario.links.link(3, 2) == Link(0.05, 1e6)
    assert scenario.links.jitter == 0.1
    assert scenario.model_bytes == 4e6
    assert scenario.neighbour_policy == "poisson"


@pytest.mark.parametrize(
    ("workload", "options", "optimizer"),
    [
        ("quadratic", {}, Sgd(0.1)),
        ("digits", {}, Sgd(0.05, 0.9, 5e-4)),
        ("digits", {"learning_rate": 0.1, "momentum": 0.0}, Sgd(0.1, 0.0, 5e-4)),
        ("digits", {"optimizer": "adamw", "weight_decay": 0.1}, AdamW(weight_decay=0.1)),
    ],
)
def test_optimizer_options(workload: str, options: Any, optimizer: Any) -> None:
    study = make_study(SimulateArguments(workload=workload, **options))
    assert study.cases[0].scenario.optimizer == optimizer
    assert {job.scenario.num_steps for job in study.jobs()} == {100.0}


def test_the_digits_are_trained_as_in_the_demo() -> None:
    from gossipdp_lab.tasks.digits import Digits

    digits = Digits(network="perceptron")
    settings = digits.make_optimizer(digits.make_model()).param_groups[0]
    simulated = make_study(SimulateArguments(workload="digits")).cases[0].scenario.optimizer
    assert simulated == Sgd(settings["lr"], settings["momentum"], settings["weight_decay"])


def test_quadratic_options() -> None:
    arguments = SimulateArguments(
        workload="quadratic", dimension=8, noise=2.0, heterogeneity=3.0, curvature="0.1:1"
    )
    objective: Any = make_study(arguments).cases[0].scenario.objective
    assert (objective.dimension, objective.mu, objective.smoothness) == (8, 0.1, 1.0)
    assert (objective.noise_variance, objective.heterogeneity) == (2.0, 3.0)


def test_a_run_that_would_be_too_long_says_so() -> None:
    study = make_study(SimulateArguments(workers=4096))
    text = "\n".join(study.opening())
    assert "gossip: 1,907 steps at most, since the" in text
    assert "--steps sets another length" in text


def test_the_command_gives_the_same_study() -> None:
    arguments = SimulateArguments(
        graph="ring,star",
        fidelity="links",
        slow_worker=("1:2", "2:3"),
        dimension=8,
        json=Path("results.json"),
    )
    words = "gossipdp simulate --graph ring,star --fidelity links --slow-worker 1:2,2:3"
    assert command(arguments) == f"{words} --dimension 8"


# What is written.


def test_the_timeline_of_the_docs_is_what_its_command_draws(elsewhere: Path) -> None:
    page = (DOCS / "simulator.md").read_text()
    (words,) = re.findall(r"^    gossipdp simulate (.*--timeline)$", page, re.M)
    arguments = tyro.cli(SimulateArguments, args=words.split())
    study = make_study(arguments)
    traces = simulate_all(study.timeline_jobs(), processes=1)
    gossip, allreduce = (trace.records[-1].idle_share for trace in traces)
    assert gossip == 0.0
    assert allreduce == pytest.approx(0.59, abs=0.005)  # as the page says
    draw_timeline(traces, elsewhere / "timeline.png", title=study.timeline_title())
    orange = to_rgb(ACTIVITY_COLOURS["exchanging"])
    new, committed = (
        abs(imread(folder / "timeline.png")[..., :3] - orange).max(axis=2) < 0.02
        for folder in (elsewhere, DOCS / "figures")
    )
    assert new.shape == committed.shape
    # The same exchanges; letters, and so places, may differ a little between versions.
    assert (new != committed).sum() < 0.2 * committed.sum()


def test_consensus_on_a_ring(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--workers 16 --json results.json --timeline --processes 1") == 0
    written = strict(elsewhere / "results.json")
    assert set(written["methods"]) == {"a2cid2", "gossip"}
    # The design's table, with Poisson edges.
    for method, decay in (("a2cid2", 0.234), ("gossip", 0.078)):
        results = written["methods"][method]
        assert results["decay_per_exchange"] == pytest.approx(decay, rel=0.15)
        assert results["decay_per_exchange_spread"] > 0
        assert len(results["decay_per_exchange_by_seed"]) == 3
        assert results["achieved_comm_rate"] == pytest.approx(1.0, rel=0.1)
        assert results["lowest_share"] < 1e-24
        length = len(results["time_s"])
        for name in ("consensus_distance", "exchanges", "gradient_steps", "idle_share", "loss"):
            assert len(results[name]) == len(results[f"{name}_spread"]) == length
        assert set(results["loss"]) == {None}
        assert results["events_per_s"] > 0
    assert written["seeds"] == [0, 1, 2]
    assert written["configuration"]["workers"] == 16
    assert written["command"] == "gossipdp simulate"
    assert written["version"]
    figure = elsewhere / "runs" / "simulate-consensus-ring-16" / "figure.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.with_name("figure-timeline.png").is_file()
    printed = capsys.readouterr().out
    for expected in (
        "mean ± standard deviation over 3 seeds",
        "times as fast as gossip",
        " s of computing: ",
        f"figure: {figure.relative_to(elsewhere)}",
        "results: results.json",
    ):
        assert expected in printed


def test_several_graphs_and_rates(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--graph ring,star --comm-rate 1,2 --workers 6 --methods gossip,allreduce --seeds 4,"
    task = "--workload quadratic --steps 10 --dimension 4"
    assert simulate(f"{words} {task} --json results.json --figure figure.png") == 0
    written = strict(elsewhere / "results.json")
    assert "methods" not in written
    assert [(case["graph"], case["comm_rate"]) for case in written["cases"]] == [
        ("ring", 1.0),
        ("ring", 2.0),
        ("star", 1.0),
        ("star", 2.0),
    ]
    for case in written["cases"]:
        results = case["methods"]["gossip"]
        assert "decay_per_exchange" not in results
        assert results["loss"][-1] < results["loss"][0]
        assert set(results["loss_spread"]) == {0.0}
        assert case["methods"]["allreduce"]["idle_share"][-1] > 0
    printed = capsys.readouterr().out
    assert "star gossip r=2" in printed
    assert "at fidelity ideal links cost only allreduce time, at a latency of 0.5 ms;" in printed


def test_digits_with_a_slow_worker(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workload digits --workers 4 --steps 12 --seeds 2 --slow-worker 1:3 --batch-size 16"
    assert simulate(f"{words} --methods gossip --json results.json --figure figure.png") == 0
    written = strict(elsewhere / "results.json")
    results = written["methods"]["gossip"]
    assert written["metric_name"] == "test_accuracy"
    assert results["gradient_steps_of_slowest_worker"] < 6
    assert results["gradient_steps_of_fastest_worker"] >= 11
    assert results["metric"][-1] > results["metric"][0]
    assert "test accuracy" in capsys.readouterr().out


def test_what_never_agrees_or_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--workers 4 --methods none,allreduce --seeds 1") == 0
    printed = capsys.readouterr().out
    assert "none: workers that exchange nothing never agree" in printed
    assert "allreduce: the workers agree after a few exchanges at once" in printed
    words = "--workload quadratic --workers 4 --learning-rate 1e9 --methods gossip --seeds 1"
    assert simulate(f"{words} --json results.json") == 0
    assert "diverged: gossip; try a lower --learning-rate" in capsys.readouterr().out
    assert strict(Path("results.json"))["methods"]["gossip"]["consensus_distance"][-1] is None


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--methods a2cid2 --eta-factor 40", "--alpha-tilde-factor or --eta-factor"),
        ("--methods a2cid2 --alpha-tilde-factor 40", "--alpha-tilde-factor or --eta-factor"),
        ("--workers 1", None),
    ],
)
def test_no_steps_help_those_that_diverge_or_are_alone(
    words: str, advice: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(f"{words} --seeds 1 --steps 300 --dimension 2") == 0
    printed = capsys.readouterr().out
    assert "--steps" not in printed
    assert "--learning-rate" not in printed
    assert ("diverged: a2cid2" in printed) == (advice is not None)
    assert advice is None or advice in printed


OBJECTIVE = """
import torch
from gossipdp_lab.simulate.module_objective import ModuleObjective

def batches(rank, num_workers, seed):
    return [torch.randn(8, 3, generator=torch.Generator().manual_seed(rank))]

def loss(model, batch):
    if FAILS:
        raise ValueError("the user's own error")
    return model(batch).square().mean()

def make():
    return ModuleObjective(lambda: torch.nn.Linear(3, 1), loss, batches, name="mine")
"""


def test_a_module_of_the_user_s(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "mine.py").write_text(OBJECTIVE.replace("FAILS", "False"))
    words = "--workers 3 --steps 10 --seeds 2 --processes 2 --methods gossip --figure figure.png"
    assert simulate(f"--workload mine.py:make {words}") == 0
    assert capsys.readouterr().out.startswith("mine, ring of 3 workers")


def test_the_same_whatever_the_number_of_processes(elsewhere: Path) -> None:
    base = SimulateArguments(workers=8, methods="dpsgd,gossip", fidelity="links", steps=20.0)
    digests = []
    for processes in (1, 2):
        path = elsewhere / f"{processes}.json"
        assert run(replace(base, processes=processes, json=path)) == 0
        digests.append([results["digests"] for results in strict(path)["methods"].values()])
    assert digests[0] == digests[1]


# The last of those with processes: an error ends them, and the next have to import torch.
def test_an_error_of_the_user_s_shows_its_traceback(elsewhere: Path) -> None:
    (elsewhere / "mine.py").write_text(OBJECTIVE.replace("FAILS", "True"))
    words = "--workers 3 --steps 10 --seeds 2 --methods gossip --processes 2"
    with pytest.raises(ValueError, match="the user's own error") as caught:
        simulate(f"--workload mine.py:make {words}")
    assert "mine.py" in str(caught.value.__cause__)
    assert not (elsewhere / "runs").exists()


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0,1,2", [0, 1, 2]), ("3", [0, 1, 2]), ("7,", [7]), ("9, 4", [9, 4])],
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", ",", "0", "1,1", "1,,2", "-1", "0.5", "1;2"])
def test_seeds_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(ValueError, match="--seeds is"):
        parse_seeds(text)


# Objectives of the user's own, by the place of a function.

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from gossipdp_lab.simulate.objectives import Quadratic

@dataclass
class Settings:
    dimension: int = 3

def mine():
    return Quadratic(Settings().dimension)

def wrong():
    return 5
"""


def test_a_function_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    objective = load_objective("own.py:mine")
    assert objective.name == "quadratic"
    assert objective.begin(2, 0).start.shape == (2, 3)


def test_a_function_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_objectives.py").write_text(OWN + "\nclass Other: pass\n")
    (tmp_path / "own_broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_objective("own_objectives:mine").metric_name is None
    for place, problem in {
        "own_objectives:yours": "own_objectives has no function 'yours'",
        "own_objectives:wrong": "own_objectives:wrong returned a int; it must return a gossipdp",
        "own_objective:mine": "there is no module 'own_objective' on the import path; name a file",
        "own.objectives:mine": "there is no module 'own.objectives'",
        f"{tmp_path}/other.py:mine": "there is no file .*other.py",
        "own_objectives:": "names no function; write package.module:function or file.py:function",
    }.items():
        with pytest.raises(ValueError, match=problem):
            load_objective(place)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_objective("own_broken:mine")


def test_options_of_methods_reach_those_that_know_them(tmp_path: Path) -> None:
    arguments = SimulateArguments(
        workload="quadratic",
        optimizer="adamw",
        workers=4,
        steps=24,
        seeds="1",
        methods="gossip,diloco,allreduce",
        sync_every=4,
        outer_momentum=0.5,
        exchange_moments=("exp_avg_sq:2",),
        json=tmp_path / "out.json",
    )
    scenario = make_study(arguments).jobs()[0].scenario
    assert scenario.outer == OuterStep(momentum=0.5)
    assert scenario.exchange_moments == {"exp_avg_sq": 2}
    assert scenario.sync_every == 4
    assert run(arguments) == 0
    methods = strict(tmp_path / "out.json")["methods"]
    assert len(methods) == 3
    assert all(each["loss"][-1] < each["loss"][0] for each in methods.values())
