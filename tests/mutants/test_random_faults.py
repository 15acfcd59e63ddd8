"""``make mutants RANDOM=N``: its draws and its edits."""

from dataclasses import replace

import pytest
import random_faults
from drawn_faults import Fault, draw, faults_of
from random_faults import Equivalent, load_equivalents, read_texts
from reached_lines import Record

TEXTS = read_texts(["dynamics", "graph"])
# One line a case: what stands there, what the fault makes of it, and its kind. Letters that take
# several bytes stand before each, as columns are counted in bytes.
CASES = """
ä = x < y | ä = x <= y | comparison
ä = x is not y | ä = x is y | comparison
ä = x not  in y | ä = x in y | comparison
ä = x < num_z | ä = x < num_z - 1 | bound
ä = x[1:y] | ä = x[1:y + 1] | bound
ä = list(range(x + y)) | ä = list(range(x + y - 1)) | bound
ä = (x) + (y) | ä = (x) - (y) | sign
ä = -x | ä = x | sign
x //= y | x *= y | sign
ä = z(x, y) | ä = z(y, x) | swapped
ä = z((x), k=y)(1, 2) | ä = z((x), k=y)(2, 1) | swapped
return x, y | return y, x | swapped
x.drop(y) | pass | dropped call
x.ready.wait() | pass | removed wait
x.y = z | pass | stale field
x = y | pass | dropped statement
raise ValueError(f"{x - 1}") | pass | dropped statement
ä = 1 if x <= y else z | ä = 1 if not (x <= y) else z | negated condition
ä = 1 if not x else z | ä = 1 if x else z | negated condition
ä = x and y | ä = x or y | negated condition
ä = (x or y) and z | ä = (x or y) | dropped condition
ä = max(x, y) | ä = min(x, y) | max and min
ä = max(x, y) | ä = (y) | max and min
ä = math.floor(x) | ä = math.ceil(x) | max and min
ä = statistics.median(x) | ä = list(x)[-1] | max and min
ä = x[0] | ä = x[-1] | first and last
x.append(y) | x.insert(0, y) | first and last
ä = x.popleft() | ä = x.pop() | first and last
ä = 0x1f | ä = 0x20 | constant
ä = 1_000 | ä = 999 | constant
ä = 0.5 | ä = 0.25 | constant
ä = z(k=True) | ä = z(k=False) | constant
""".strip().splitlines()
BLOCKS = """
with x.lock: | if True: | removed lock
with x, y.lock: | with x: | removed lock
except OSError as error: | except () as error: | removed handler
finally: | except (): | removed finally
 | break | loop that ends at once
 | return | early return
""".strip().splitlines()
BLOCK = '''
def function(x, y):
    """Return - 1 < 2."""
    with x.lock:
        with x, y.lock:
            try:
                ...
            except OSError as error:
                ...
    try:
        ...
    finally:
        ...
    for each in x:
        pass
    x.last()
'''
UNTOUCHED = '''
"""Whether 1 < 2 and not 3."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import x
    assert x < 1
@decorate(1, 2)
class One(Base, frozen=True):
    field: Literal[1, -2] | None
    def __repr__(self) -> str:
        return self.x - 1
    def method(self, value: "int | None" = None, *, other: Literal[3] = x) -> None:
        """Say 1."""
        assert value > 1, value - 1
        logger.warning("%s", max(value, 1))
        return f"{value - 1}"
'''


def changed(fault: Fault, text: str) -> tuple[str, ...]:
    """Return the lines that a fault removes, and those that it adds."""
    lines = fault.diff(text).splitlines()[2:]
    return tuple(", ".join(each[1:].strip() for each in lines if each[0] == sign) for sign in "-+")


def made_of(text: str) -> dict[tuple[str, str], str]:
    """Return the kind of each fault by the lines it removes and adds."""
    faults = [fault for fault in faults_of("gossipdp/a/b.py", text) if fault.compiles(text)]
    return {changed(fault, text): fault.kind for fault in faults}


@pytest.mark.parametrize("case", CASES + BLOCKS)
def test_a_line_becomes_another(case):
    old, new, kind = case.split(" | ")
    line = f"def function(x, y, z):\n    if z:\n        {old}\n    return 'é'\n"
    assert made_of(BLOCK if case in BLOCKS else line)[old, new] == kind


def test_every_kind_is_among_these_cases():
    drawn = {fault.kind for file, text in TEXTS.items() for fault in faults_of(file, text)}
    assert drawn == {case.split(" | ")[2] for case in CASES + BLOCKS}


def test_messages_annotations_and_what_only_checkers_see_are_left_alone():
    assert made_of(UNTOUCHED) == {}


def test_the_same_seed_draws_the_same_faults_and_another_seed_others():
    first, again, other = (draw(50, seed, TEXTS) for seed in (1, 1, 2))
    assert first == again
    assert len(set(first)) == 50
    assert len(set(first) & set(other)) < 10
    assert draw(20, 1, TEXTS) == first[:20]
    with pytest.raises(ValueError, match="draw fewer"):
        draw(10**6, 1, {"gossipdp/a/b.py": "x = 1\n"})


def test_each_fault_is_one_small_hunk_and_compiles():
    for fault in draw(100, 3, TEXTS):
        text = TEXTS[fault.file]
        compile(fault.apply(text), fault.file, "exec")
        assert fault.diff(text).count("\n@@") == 1
        assert len([line for line in fault.diff(text).splitlines() if line[0] == "+"]) <= 3
        assert text.splitlines()[fault.lines[0] - 1].strip()


def test_heavier_packages_are_drawn_more_often():
    same = "\n".join(f"x{i} = {i} + y" for i in range(99))
    drawn = draw(200, 1, {"gossipdp/dynamics/a.py": same, "gossipdp/graph/a.py": same})
    assert 130 < sum(fault.package == "dynamics" for fault in drawn) < 170


# The faults that are judged equivalent.

FILE, TEXT = "gossipdp/dynamics/phase.py", TEXTS["gossipdp/dynamics/phase.py"]
IN_FUNCTION = next(
    fault for fault in faults_of(FILE, TEXT) if fault.is_in_function and fault.kind == "sign"
)
AT_TOP = next(fault for fault in faults_of(FILE, TEXT) if not fault.is_in_function)


def test_a_fault_that_is_judged_equivalent_does_not_run(monkeypatch):
    entry = Equivalent(FILE, "Nobody can notice.", TEXT, IN_FUNCTION.apply(TEXT))
    monkeypatch.setattr(random_faults, "load_equivalents", lambda: [entry])
    tests = Record([])
    outcome = random_faults.run(1, IN_FUNCTION, TEXT, tests, seconds=1.0)
    assert outcome.verdict == random_faults.EXEMPT
    assert not entry.is_of(AT_TOP, TEXT)
    assert not entry.is_of(replace(IN_FUNCTION, file="gossipdp/dynamics/state.py"), TEXT)
    assert random_faults.run(2, AT_TOP, TEXT, tests, seconds=1.0).verdict == random_faults.UNREACHED


def test_each_equivalent_fault_is_one_that_could_be_drawn_and_no_other():
    texts = read_texts()
    for entry in load_equivalents():
        assert entry.why.endswith(".")
        text = texts[entry.file]
        assert text.count(entry.old) == 1, entry
        faults = faults_of(entry.file, text)
        found = {(fault.span, fault.new) for fault in faults if entry.is_of(fault, text)}
        assert len(found) == 1, entry
