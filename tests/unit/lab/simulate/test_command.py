"""``gossipdp simulate``: refused options, the study of valid ones, and its output."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import tyro

from gossipdp.cli.main import main
from gossipdp_lab.simulate.command import SimulateArguments
from gossipdp_lab.simulate.command_results import as_json, command, notes
from gossipdp_lab.simulate.command_study import Study, make_study, parse_seeds
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


def study_of(words: str) -> Study:
    return make_study(tyro.cli(SimulateArguments, args=words.split()))


def results(words: str) -> tuple[Any, str]:
    """Return the JSON and the notes of a study, without pictures."""
    study = study_of(words)
    ensembles = study.ensembles(simulate_all(study.jobs(), processes=1))
    return as_json(study, ensembles), "\n".join(notes(study, ensembles))


def strict(path: Path) -> Any:
    def fail(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=fail)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--methods telepathy", "no method 'telepathy'; choose among a2cid2, gossip"),
        ("--methods gossip,gossip", "each may stand there once"),
        ("--comm-rate 1,1.0", "each may stand there once"),
        ("--comm-rate fast", "--comm-rate is 'fast'; it must be a positive number"),
        ("--graph hypercube --workers 7", "hypercube"),
        ("--workers 0", "--workers is 0"),
        ("--steps nan", "--steps is nan"),
        ("--seeds some", "--seeds is 'some'"),
        ("--processes 0", "--processes is 0"),
        ("--fidelity links --slow-worker 16:2", "no rank 16 among 16 workers"),
        ("--fidelity links --slow-worker 1:2,1:3", "rank 1 is given twice"),
        ("--fidelity links --slow-worker 1", "write RANK:FACTOR"),
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


def test_the_default_study() -> None:
    study = study_of("--graph ring")
    assert (study.methods, study.seeds) == (["a2cid2", "gossip"], [0, 1, 2])
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
    opening = "\n".join(study_of("--graph ring --workers 4096").opening())
    assert "gossip: 1,907 steps at most, since the" in opening
    assert "--steps sets another length" in opening


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--fidelity links --step-ms 20", {"compute_time": ConstantTime(0.02)}),
        ("--fidelity links --step-spread 0.5", {"compute_time": LognormalTime(0.1, 0.5)}),
        (
            "--fidelity links --slow-worker 2:4,3:1.5 --slow-worker 0:2",
            {"compute_time": SlowedTime(ConstantTime(0.1), {2: 4.0, 3: 1.5, 0: 2.0})},
        ),
        ("--fidelity links --model-mb 4", {"model_bytes": 4e6}),
        ("--workload quadratic", {"optimizer": Sgd(0.1), "num_steps": 100.0}),
        ("--workload digits", {"optimizer": Sgd(0.05, 0.9, 5e-4)}),
        (
            "--workload digits-convolutional --learning-rate 0.1",
            {"optimizer": Sgd(0.1, 0.9, 5e-4)},
        ),
    ],
)
def test_options_become_a_scenario(words: str, expected: dict[str, Any]) -> None:
    scenario = study_of(words).cases[0].scenario
    assert {name: getattr(scenario, name) for name in expected} == expected


def test_link_options_and_the_digits_of_the_demo() -> None:
    from gossipdp_lab.tasks.digits import Digits

    words = "--fidelity links --latency-ms 2 --link-mbps 80"
    assert study_of(words).cases[0].scenario.links.every == Link(0.002, 1e7)
    digits = Digits(network="perceptron")
    settings = digits.make_optimizer(digits.make_model()).param_groups[0]
    simulated = study_of("--workload digits").cases[0].scenario.optimizer
    assert simulated == Sgd(settings["lr"], settings["momentum"], settings["weight_decay"])


def test_the_command_gives_the_same_study() -> None:
    words = "--graph ring,star --fidelity links --slow-worker 1:2,2:3"
    given = study_of(f"{words} --timeline --json results.json").arguments
    assert command(given) == f"gossipdp simulate {words}"
    of_file = SimulateArguments(file=Path("a.py"), methods="gossip")
    assert command(of_file) == "gossipdp simulate a.py --methods gossip"


def test_the_timeline_of_the_docs_idles_as_they_say() -> None:
    page = (DOCS / "simulator.md").read_text()
    (words,) = re.findall(r"^    gossipdp simulate (.*--timeline)$", page, re.M)
    traces = simulate_all(study_of(words).timeline_jobs(), processes=1)
    gossip, allreduce = (trace.records[-1].idle_share for trace in traces)
    assert gossip == 0.0
    assert allreduce == pytest.approx(0.59, abs=0.005)


def test_consensus_on_a_ring(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--graph ring --workers 16 --json results.json --timeline --processes 1") == 0
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
    assert written["command"] == "gossipdp simulate --graph ring"
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


def test_several_graphs_and_rates() -> None:
    words = "--graph ring,star --comm-rate 1,2 --workers 6 --methods gossip,allreduce --seeds 4,"
    written, said = results(f"{words} --workload quadratic --steps 10")
    assert "methods" not in written
    assert [(case["name"], case["graph"], case["comm_rate"]) for case in written["cases"]] == [
        (f"{graph} r={rate}", graph, rate) for graph in ("ring", "star") for rate in (1, 2)
    ]
    for case in written["cases"]:
        gossip = case["methods"]["gossip"]
        assert "decay_per_exchange" not in gossip
        assert gossip["loss"][-1] < gossip["loss"][0]
        assert set(gossip["loss_spread"]) == {0.0}
        assert case["methods"]["allreduce"]["idle_share"][-1] > 0
    assert "at fidelity ideal links cost only allreduce time, at a latency of 0.5 ms;" in said


def test_methods_that_never_agree_or_diverge() -> None:
    _, said = results("--workers 4 --methods none,allreduce --seeds 1")
    assert "none: workers that exchange nothing never agree" in said
    assert "allreduce: the workers agree after a few exchanges at once" in said
    words = "--workload quadratic --workers 4 --learning-rate 1e9 --methods gossip --seeds 1"
    written, said = results(words)
    assert "diverged: gossip; try a lower learning rate" in said
    assert written["methods"]["gossip"]["consensus_distance"][-1] is None


@pytest.mark.parametrize("changes", ["eta_factor=40.0", "alpha_tilde_factor=40.0", "num_workers=1"])
def test_more_steps_help_neither_divergence_nor_one_worker(changes: str, elsewhere: Path) -> None:
    scenario = f"Scenario(graph='ring', objective=Consensus(2), num_steps=300, {changes})"
    text = "from gossipdp_lab.simulate import Consensus, Scenario\n"
    (elsewhere / "study.py").write_text(f"{text}scenarios = {{'one': {scenario}}}\n")
    _, said = results("study.py --methods a2cid2 --seeds 1")
    assert "more steps" not in said
    advice = "diverged: a2cid2; try a lower eta_factor or alpha_tilde_factor"
    assert (advice in said) == (changes != "num_workers=1")


def test_the_file_of_the_docs(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "simulator.md").read_text()
    section = page.split("## A file of scenarios")[1]
    (elsewhere / "momentum.py").write_text(
        re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)[0]
    )
    (words,) = re.findall(r"^    gossipdp simulate (momentum.py .*)$", section, re.M)
    # Two processes: a module of the user's, which they cannot import, gets there.
    assert simulate(f"{words} --seeds 1 --processes 2") == 0
    written = strict(elsewhere / "momentum.json")
    assert [case["name"] for case in written["cases"]] == ["plain", "outer step"]
    assert written["configuration"]["file"] == "momentum.py"
    for case in written["cases"]:
        gossip = case["methods"]["gossip"]
        assert gossip["loss"][-1] < gossip["loss"][0]
    here, _ = results(f"{words} --seeds 1")
    assert [case["methods"]["gossip"]["digests"] for case in written["cases"]] == [
        case["methods"]["gossip"]["digests"] for case in here["cases"]
    ]
    printed = capsys.readouterr().out
    assert printed.startswith("scenarios of momentum.py, seed 0\n")
    assert "outer step gossip" in printed
    assert (elsewhere / "runs" / "simulate-momentum" / "figure.png").is_file()


SCENARIOS = """
from __future__ import annotations
from dataclasses import dataclass
from gossipdp_lab.simulate import Consensus, Quadratic, Scenario

@dataclass
class Settings:  # which looks its module up
    workers: int = 3

scenarios = {"mine": Scenario(num_workers=Settings().workers, objective=Quadratic())}
"""


def test_files_that_define_no_scenarios(elsewhere: Path) -> None:
    for more, problem in {
        "del scenarios": "must define scenarios, a mapping from names to Scenario objects",
        "scenarios = {}": "must define scenarios",
        "scenarios = {'one': 1}": "must define scenarios",
        "import not_installed_anywhere": "needs not_installed_anywhere, which is not installed",
        "scenarios['other'] = Scenario(objective=Consensus())": "results of different kinds",
        "scenarios['other'] = Scenario('circle', objective=Quadratic())": "circle",
    }.items():
        (elsewhere / "study.py").write_text(f"{SCENARIOS}\n{more}\n")
        with pytest.raises(ValueError, match=problem):
            study_of("study.py")
    (elsewhere / "study.txt").write_text(SCENARIOS)
    with pytest.raises(ValueError, match=r"study.txt is no Python file: let its name end in .py"):
        study_of("study.txt")


@pytest.mark.parametrize(
    ("text", "seeds"), [("0,1,2", [0, 1, 2]), ("3", [0, 1, 2]), ("7,", [7]), ("9, 4", [9, 4])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", ",", "0", "1,1", "1,,2", "-1", "0.5"])
def test_seeds_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--seeds is"):
        parse_seeds(text)
