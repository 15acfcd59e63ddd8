import json

import pytest

from gossipdp.cli.reproduce import ALL, ReproduceArguments, run
from gossipdp.reproduce.page import SECTIONS


def test_all_is_every_section():
    assert set(ALL.split(",")) == set(SECTIONS)


def test_it_writes_the_page_and_says_where(tmp_path, capsys):
    arguments = ReproduceArguments(
        only="invariant", quick=True, output=tmp_path / "new", processes=1
    )
    assert run(arguments) == 0
    page = tmp_path / "new" / "reproduction.md"
    assert str(page) in capsys.readouterr().out
    assert "`gossipdp reproduce --only invariant --quick`" in page.read_text()
    stored = json.loads((tmp_path / "new/figures/reproduction-invariant.json").read_text())
    assert stored["quick"]
    assert stored["provenance"]["hardware"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only": "mixing,pairs"}, "no section 'pairs'"),
        ({"only": " , "}, "names no section"),
        ({"processes": 0}, "number of processes is 0"),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, message):
    assert run(ReproduceArguments(output=tmp_path, **arguments)) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
