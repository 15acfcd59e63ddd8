import json
from typing import get_args

import pytest
import torch

from gossipdp.cli.main import main
from gossipdp.cli.plan import BYTES_OF_A_VALUE, WRITTEN
from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.gossip.codec import FORMATS, Codec
from gossipdp.links.tls import Tls
from gossipdp.rules import WireFormatName


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


def test_where_writing_fails_the_figures_are_shown(capsys):
    assert plan("--workers 4 --json /dev/full") == 2
    printed = capsys.readouterr()
    assert "A2CiD2 helps here" in printed.out
    assert "No space left" in printed.err


LINKS = "--workers 4 --parameters 25.6e6 --step-ms 100"  # 102.4 MB


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        # 8.2 s on the link; half of the time, so one in 164 steps of 0.1 s.
        ("--link-mbps 100 --wire-format full", ("one in 164 steps", "102 MB", "6.25 MB/s")),
        ("--link-mbps 100", ("one in 41 steps", "The link is the bound", "25.6 MB", "50 Mbit/s")),
        ("--link-mbps 25 --latency-ms 8000", ("one in 324 steps",)),
        ("--link-mbps 1e6", ("4 exchanges a step. 4 a step is the most", "Training does not wait")),
    ],
)
def test_the_rate_that_sets_itself(capsys, more, expected):
    assert plan(f"{LINKS} {more}") == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in expected:
        assert words in printed


def test_a_plan_at_the_rate_that_sets_itself(tmp_path):
    path = tmp_path / "plan.json"
    words = f"--graph ring --link-mbps 2048 --latency-ms 0 --comm-rate auto --json {path}"
    assert plan(f"{LINKS} {words}") == 0
    written = json.loads(path.read_text())
    assert written.keys() == {*WRITTEN, "edges", "auto"}
    own = written["auto"]
    assert (own["comm_rate"], own["bound"]) == (pytest.approx(0.5), "link")
    assert own["exchange_seconds"] == pytest.approx(0.1)
    assert (written["exchanges_per_unit_time"], written["edges"]) == (pytest.approx(4 / 2 * 0.5), 4)
    assert written["chi2"] == pytest.approx(3 / 4 / 0.5)


@pytest.mark.parametrize("words", ["--comm-rate auto", "--link-mbps 100", LINKS])
def test_a_rate_of_links_that_are_not_given(capsys, words):
    assert plan(f"--workers 4 {words}") == 2
    assert "--parameters, --step-ms and --link-mbps" in capsys.readouterr().err


def test_it_counts_the_bytes_that_an_exchange_sends():
    assert tuple(BYTES_OF_A_VALUE) == ("auto", *FORMATS) == get_args(WireFormatName)
    values = torch.zeros(1 << 16)
    state = State([Segment(values, Role.TRAINED)])
    for name, num_bytes in BYTES_OF_A_VALUE.items():
        codec = Codec(name, state)
        codec.load()
        codec.start(state.chunks, 0.0, 0.5, is_coded=codec.chooses_code(is_shared=False))
        sent = sum(codec.room(chunk).nbytes for chunk in state.chunks)
        assert sent == pytest.approx(num_bytes * len(values), rel=1e-3)


def test_tls_init_makes_a_pair_that_opens_links_and_overwrites_none(tmp_path, capsys):
    assert main(["tls-init", str(tmp_path / "tls")]) == 0
    Tls(tmp_path / "tls")
    assert f"gossipdp run -n 4 --tls {tmp_path / 'tls'} train.py" in capsys.readouterr().out
    assert main(["tls-init", str(tmp_path / "tls")]) == 2
    assert "cert.pem is there already" in capsys.readouterr().err
