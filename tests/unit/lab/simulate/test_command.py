"""``gossipdp simulate``: refused options, the study of valid ones, and its output."""

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
from gossipdp_lab.simulate.command import SimulateArguments, run
from gossipdp_lab.simulate.command_results import command
from gossipdp_lab.simulate.command_study import load_scenarios, make_study, parse_seeds
from gossipdp_lab.simulate.figures import ACTIVITY_COLOURS, draw_timeline
from gossipdp_lab.simulate.optimizers import Sgd
from gossipdp_lab.simulate.scenario import ConstantTime, Link, LognormalTime, SlowedTime
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


# Refused options.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--methods telepathy", "no method 'telepathy'; choose among a2cid2, gossip"),
        ("--methods a2cid2,,gossip", "--methods is 'a2cid2,,gossip'"),
        ("--methods gossip,gossip", "each may stand there once"),
        ("--comm-rate 1,1.0", "each may stand there once"),
        ("--comm-rate 0", "--comm-rate is '0'; it must be a positive number"),
        ("--comm-rate fast", "--comm-rate is 'fast'; it must be a positive number"),
        ("--graph circle", "circle"),
        ("--graph hypercube --workers 7", "hypercube"),
        ("--workers 0", "--workers is 0"),
        ("--steps 0", "--steps is 0"),
        ("--steps nan", "--steps is nan"),
        ("--seeds some", "--seeds is 'some'"),
        ("--processes 0", "--processes is 0"),
        ("--fidelity links --slow-worker 16:2", "no rank 16 among 16 workers"),
        ("--fidelity links --slow-worker 1:2,1:3", "rank 1 is given twice"),
        ("--fidelity links --slow-worker 1", "write RANK:FACTOR"),
        ("--fidelity links --slow-worker 1:-2", "--slow-worker 1:-2 is '-2'"),
        ("--slow-worker 1:2", "--slow-worker has no effect here"),
        ("--step-ms 0", "--step-ms is 0.0; it must be a positive number"),
        ("--workload quadratic --step-spread 10", "--step-spread is 10, but must be from 0 to 3"),
        ("--link-mbps 10", "--link-mbps has no effect here"),
        ("--fidelity links --model-mb -1", "--model-mb is -1"),
        ("--learning-rate 1", "--learning-rate has no effect in --workload consensus"),
        ("--methods diloco", "method diloco averages what gradient steps did"),
        ("--json missing/results.json", "the directory to write it to does not exist"),
        ("--json .", "cannot be written"),
        ("--figure figure.pdf", "let its name end in .png"),
        ("--figure missing/figure.png", "the directory to write it to does not exist"),
        ("missing.py", "there is no file missing.py"),
        ("missing.py --workers 8", "--workers does not go with missing.py: set it in the Scenario"),
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


# The study of the options.


def test_what_is_simulated_by_default() -> None:
    study = make_study(SimulateArguments())
    assert study.methods == ["a2cid2", "gossip"]
    assert study.seeds == [0, 1, 2]
    (case,) = study.cases
    assert case.scenario.compute_time == ConstantTime(0.1)
    assert case.scenario.links.every == Link(0.0005, math.inf)
    assert case.scenario.model_bytes is None
    jobs = study.jobs()
    assert [(job.method, job.scenario.seed) for job in jobs] == [
        (method, seed) for method in ("a2cid2", "gossip") for seed in (0, 1, 2)
    ]
    # Gossip needs longer, in proportion to theory's rates.
    assert jobs[3].scenario.num_steps > 3 * jobs[0].scenario.num_steps


def test_compute_options() -> None:
    links = SimulateArguments(fidelity="links")
    for options, expected in (
        ({"step_ms": 20.0}, ConstantTime(0.02)),
        ({"step_spread": 0.5}, LognormalTime(0.1, 0.5)),
        (
            {"slow_worker": ("2:4,3:1.5", "0:2")},
            SlowedTime(ConstantTime(0.1), {2: 4.0, 3: 1.5, 0: 2.0}),
        ),
    ):
        arguments = replace(links, **options)
        assert make_study(arguments).cases[0].scenario.compute_time == expected


def test_network_options() -> None:
    arguments = SimulateArguments(fidelity="links", latency_ms=2.0, link_mbps=80.0, model_mb=4.0)
    scenario = make_study(arguments).cases[0].scenario
    assert scenario.links.every == Link(0.002, 1e7)
    assert scenario.model_bytes == 4e6


@pytest.mark.parametrize(
    ("workload", "options", "optimizer"),
    [
        ("quadratic", {}, Sgd(0.1)),
        ("digits", {}, Sgd(0.05, 0.9, 5e-4)),
        ("digits-convolutional", {"learning_rate": 0.1}, Sgd(0.1, 0.9, 5e-4)),
    ],
)
def test_workloads(workload: Any, options: Any, optimizer: Any) -> None:
    study = make_study(SimulateArguments(workload=workload, **options))
    assert study.cases[0].scenario.optimizer == optimizer
    assert study.objective.name == workload
    assert {job.scenario.num_steps for job in study.jobs()} == {100.0}


def test_the_digits_are_trained_as_in_the_demo() -> None:
    from gossipdp_lab.tasks.digits import Digits

    digits = Digits(network="perceptron")
    settings = digits.make_optimizer(digits.make_model()).param_groups[0]
    simulated = make_study(SimulateArguments(workload="digits")).cases[0].scenario.optimizer
    assert simulated == Sgd(settings["lr"], settings["momentum"], settings["weight_decay"])


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
        timeline=True,
        json=Path("results.json"),
    )
    words = "gossipdp simulate --graph ring,star --fidelity links --slow-worker 1:2,2:3"
    assert command(arguments) == words
    of_file = SimulateArguments(file=Path("a.py"), methods="gossip")
    assert command(of_file) == "gossipdp simulate a.py --methods gossip"


# The output.


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
    task = "--workload quadratic --steps 10"
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
    assert "star r=2 gossip" in printed
    assert "at fidelity ideal links cost only allreduce time, at a latency of 0.5 ms;" in printed


def test_digits_with_a_slow_worker(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workload digits --workers 4 --steps 12 --seeds 2 --slow-worker 1:3"
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
    assert "diverged: gossip; try a lower learning rate" in capsys.readouterr().out
    assert strict(Path("results.json"))["methods"]["gossip"]["consensus_distance"][-1] is None


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ("eta_factor=40.0", "try a lower eta_factor or alpha_tilde_factor"),
        ("alpha_tilde_factor=40.0", "try a lower eta_factor or alpha_tilde_factor"),
        ("num_workers=1", None),
    ],
)
def test_no_steps_help_those_that_diverge_or_are_alone(
    changes: str, advice: str | None, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = f"Scenario(objective=Consensus(2), num_steps=300, {changes})"
    text = "from gossipdp_lab.simulate import Consensus, Scenario\n"
    (elsewhere / "study.py").write_text(f"{text}scenarios = {{'one': {scenario}}}\n")
    assert simulate("study.py --methods a2cid2 --seeds 1") == 0
    printed = capsys.readouterr().out
    assert "more steps" not in printed
    assert "learning rate" not in printed
    assert ("diverged: a2cid2" in printed) == (advice is not None)
    assert advice is None or advice in printed


# Scenarios of a file.


def test_the_file_of_the_docs(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "simulator.md").read_text()
    section = page.split("## A file of scenarios")[1]
    (elsewhere / "momentum.py").write_text(
        re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)[0]
    )
    (words,) = re.findall(r"^    gossipdp simulate (momentum.py .*)$", section, re.M)
    assert simulate(f"{words} --seeds 1") == 0
    written = strict(elsewhere / "momentum.json")
    assert [case["name"] for case in written["cases"]] == ["plain", "outer step"]
    assert written["configuration"]["file"] == "momentum.py"
    for case in written["cases"]:
        results = case["methods"]["gossip"]
        assert results["loss"][-1] < results["loss"][0]
        assert len(results["digests"]) == 1
    assert len({case["methods"]["gossip"]["digests"][0] for case in written["cases"]}) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("scenarios of momentum.py, seed 0\n")
    assert "outer step gossip" in printed
    assert (elsewhere / "runs" / "simulate-momentum" / "figure.png").is_file()


SCENARIOS = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from gossipdp_lab.simulate import Consensus, ModuleObjective, Quadratic, Scenario

@dataclass
class Settings:
    features: int = 3

def batches(rank, num_workers, seed):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, Settings().features, generator=generator)]

def loss(model, batch):
    if FAILS:
        raise ValueError("the user's own error")
    return model(batch).square().mean()

objective = ModuleObjective(lambda: torch.nn.Linear(3, 1), loss, batches, name="mine")
scenarios = {"mine": Scenario(num_workers=3, num_steps=10, objective=objective)}
"""


def test_files_that_define_no_scenarios(elsewhere: Path) -> None:
    text = SCENARIOS.replace("FAILS", "False")
    for more, problem in {
        "del scenarios": "must define scenarios, a mapping from names to Scenario objects",
        "scenarios = {}": "must define scenarios",
        "scenarios = {'one': 1}": "must define scenarios",
        "import not_installed_anywhere": "needs not_installed_anywhere, which is not installed",
        "scenarios['other'] = Scenario(objective=Consensus())": "results of different kinds",
        "scenarios['other'] = Scenario('circle', objective=objective)": "circle",
    }.items():
        (elsewhere / "study.py").write_text(f"{text}\n{more}\n")
        with pytest.raises(ValueError, match=problem):
            make_study(SimulateArguments(file=Path("study.py")))
    (elsewhere / "study.txt").write_text(text)
    with pytest.raises(ValueError, match=r"study.txt is no Python file: let its name end in .py"):
        load_scenarios(elsewhere / "study.txt")


def test_a_module_of_the_user_s_in_other_processes(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "mine.py").write_text(SCENARIOS.replace("FAILS", "False"))
    words = "mine.py --seeds 4,5 --processes 2 --methods gossip --figure figure.png"
    assert simulate(words) == 0
    assert capsys.readouterr().out.startswith("scenarios of mine.py, 2 seeds\n")


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
    (elsewhere / "mine.py").write_text(SCENARIOS.replace("FAILS", "True"))
    with pytest.raises(ValueError, match="the user's own error") as caught:
        simulate("mine.py --seeds 2 --methods gossip --processes 2")
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
