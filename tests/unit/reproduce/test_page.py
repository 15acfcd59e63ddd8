import re

import msgspec
import pytest

from gossipdp.reproduce.page import SECTIONS, reproduce
from gossipdp.reproduce.section import Effort
from gossipdp.reproduce.stored import Stored

QUICK = Effort(quick=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("docs")
    return reproduce(list(SECTIONS), directory, QUICK, "gossipdp reproduce --quick")


def test_every_section_is_there_with_figure_table_and_provenance(written):
    text = written.read_text()
    for number, section in enumerate(SECTIONS.values(), start=1):
        heading = f"\n## {number}. {section.title}\n"
        assert text.count(heading) == 1
        part = text.split(heading)[1].split("\n## ")[0]
        assert "**Quick run.**" in part
        assert "Verdict: **" in part
        assert "What differs" in part
        assert "| --- |" in part
        assert "`gossipdp reproduce --quick`; gossipdp " in part
        for link in re.findall(r"\]\(([^)#]+)\)", part):
            assert (written.parent / link).stat().st_size > 1000, link
        assert "<figure>" not in part


def test_results_survive_being_stored(written):
    for name, section in SECTIONS.items():
        stored = Stored.read(written.parent / "figures" / f"reproduction-{name}.json")
        assert stored is not None
        assert stored.quick
        result = msgspec.json.decode(stored.result, type=section.result_type)
        again = msgspec.json.decode(msgspec.json.encode(result), type=section.result_type)
        assert again == result
        assert section.write(again) == section.write(result)


def test_the_page_is_rebuilt_from_what_is_stored(written):
    before = written.read_text()
    assert reproduce([], written.parent, QUICK, "another command").read_text() == before


def test_one_section_alone_leaves_the_others_unrun_and_said_so(tmp_path):
    text = reproduce(["invariant"], tmp_path, QUICK, "gossipdp reproduce").read_text()
    assert text.count("Not run yet") == len(SECTIONS) - 1
    assert "*Not run yet: `gossipdp reproduce --only mixing`.*" in text


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no section 'mixin'; choose among mixing"):
        reproduce(["mixin"], tmp_path, QUICK, "")
    with pytest.raises(ValueError, match="number of processes is 0"):
        Effort(num_processes=0)
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ValueError, match="not a stored result"):
        Stored.read(broken)
