"""The race's tables on the pages, which come from its results files.

    python benchmarks/race_pages.py     write them again, in README.md and docs/race.md

A table stands between the comments ``<!-- race: NAME -->`` and ``<!-- end -->``. Its name is a key
of ``TABLES``, or a results file and a condition, such as ``race calm``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from race import read_choices
from race_report import CALM, COLUMNS, Column, Run, Runs, cells, read, short
from support.finished_runs import FinishedRuns
from support.quality_rows import KINDS, RowName
from support.report import RESULTS, markdown_table

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "race.md")
MARKED = re.compile(r"(?<=<!-- race: )([\w ]+)( -->\n\n).*?(?=<!-- end -->)", re.DOTALL)

THOUSANDS = Column(
    "thousands of samples kept", "samples", ".0f", max, lambda run, *_: run.samples / 1e3
)
BY_KEY = {column.key: column for column in COLUMNS} | {THOUSANDS.key: THOUSANDS}
DETAILS = (
    "samples", "samples_ratio", "loss", "loss_ratio", "share_of_calm", "restart_s", "megabytes"
)  # fmt: skip
"""The columns of a condition's table; without those of which it has no figure."""

WORST = "kills10_moving"
SUMMARY = {CALM: "calm", "moving": "slow", "kills10": "kills", WORST: "both"}
REST = {
    ("race_more", "slow"): "one worker is 4 times slower",
    ("race_more", "jitter"): "step times vary (lognormal, 0.3)",
    ("race_more", "stops"): "five stops of 2 to 8 s",
    ("race_first", "kills30"): "a kill every 30 s",
    ("race_first", "kills120"): "a kill every 120 s, 300 s of training",
    ("race_more", "vanish"): "a host vanishes every 30 s",
    ("race_link", "bad_link"): "one worker at 100 Mbit/s, others at 1 Gbit/s",
}
"""The conditions that share a table: the results file of each, and its text."""


@cache
def stored(name: str) -> dict[str, Runs]:
    """Return the runs of a results file, by condition and row."""
    return {**read(RESULTS / f"{name}.json")}


def condition(name: str, of: str) -> str:
    """Return the table of a condition: a line a row, ranges in brackets."""
    runs, calm = stored(name)[of], stored(name).get(CALM, {})
    columns = [BY_KEY[key] for key in DETAILS if of != CALM or key != "share_of_calm"]
    lines = cells(runs, calm, columns)
    known = [
        number for number, each in enumerate(zip(*lines.values(), strict=True)) if {*each} != {"-"}
    ]
    return markdown_table(
        ("", *(columns[number].name for number in known)),
        [(short(row), *(texts[number] for number in known)) for row, texts in lines.items()],
    )


def medians(runs: Runs, key: str, form: str) -> dict[str, str]:
    """Return the medians of a figure by row, without their ranges, the best one bold."""
    column = BY_KEY[key]._replace(form=form)
    return {row: text for row, (text,) in cells(runs, {}, [column], with_ranges=False).items()}


def summary() -> str:
    """Return the README's table: a line a row, samples and loss of four conditions."""
    found = [
        medians(stored("race")[of], *how)
        for of in SUMMARY
        for how in (("samples", ".0f"), ("loss", ".2f"))
    ]
    head = ("", *(text for name in SUMMARY.values() for text in (name, "loss")))
    lines = [(short(row), *(each[row] for each in found)) for row in found[0]]
    return markdown_table(head, lines)


def rest(key: str) -> str:
    """Return the table of a figure: a line a condition, a column a row."""
    column = BY_KEY[key]
    found = {text: stored(name)[of] for (name, of), text in REST.items()}
    rows = list(dict.fromkeys(row for runs in found.values() for row, each in runs.items() if each))
    lines = [
        (text, *(medians(runs, key, column.form).get(row, "") for row in rows))
        for text, runs in found.items()
    ]
    return markdown_table((column.name, *map(short, rows)), lines)


def tuned() -> str:
    """Return the table of the rows' own settings in the race: a line a row."""
    lines = []
    for row, (run, *_) in stored("race")[WORST].items():
        settings, name = run.settings, RowName.parse(row)
        outer = settings.outer if "DiLoCo" in KINDS[name.kind].label else None
        waits: tuple[str, ...] = ("", "", "")
        if settings.heartbeat_ms is not None and settings.join_ms is not None:
            between_ms = (name.period or 0) * 1e3 * settings.step_s
            join_s = (settings.join_ms - between_ms) / 1e3
            waits = (f"{settings.heartbeat_ms / 1e3:g}", f"{settings.timeout_s}", f"{join_s:g}")
        lines.append(
            (
                short(row),
                f"{settings.learning_rate:g}",
                f"{settings.weight_decay:g}",
                "yes" if settings.keeps_spare else "no",
                "" if outer is None else "{:g}, {:g}".format(*outer),
                *waits,
            )
        )
    head = ("", "learning rate", "weight decay", "spares", "outer rate, momentum")
    return markdown_table(
        (*head, "dead after (s)", "time-out (s)", "waits for late ones (s)"), lines
    )


def decay(kind: str, seconds: float) -> str:
    """Return the losses of calm runs by weight decay: a line a row, the least one bold.

    kind: of runs, for whose length the rows are tuned, as in ``race_choices.json``.
    """
    tuning = FinishedRuns(RESULTS / "race_tuning_55.jsonl", Run, lambda run: run.settings.key)
    losses: dict[str, dict[float, float]] = {}
    for row, choice in read_choices()[kind].items():
        for run in tuning.known.values():
            settings = run.settings
            of = (settings.row, settings.condition, settings.seconds)
            own = (settings.learning_rate, settings.outer)
            if of == (row, CALM, seconds) and own == (choice.learning_rate, choice.outer):
                losses.setdefault(row, {})[settings.weight_decay] = run.loss
    decays = sorted(set().union(*losses.values()), reverse=True)
    lines = []
    for row, found in losses.items():
        texts = {each: f"{loss:.3f}" for each, loss in found.items()}
        least = min(found, key=lambda each: found[each])
        texts[least] = f"**{texts[least]}**"
        lines.append((short(row), *(texts.get(each, "") for each in decays)))
    return markdown_table(("weight decay", *(f"{each:g}" for each in decays)), lines)


TABLES: dict[str, Callable[[], str]] = {
    "tuned": tuned,
    "decay": partial(decay, "timed", 70.0),
    "long decay": partial(decay, "long", 300.0),
    "summary": summary,
    "rest samples": partial(rest, "samples"),
    "rest loss": partial(rest, "loss"),
}


def rewritten(page: str) -> str:
    """Return a page with the tables of today's results."""

    def again(found: re.Match[str]) -> str:
        name = found[1]
        text = TABLES[name]() if name in TABLES else condition(*name.split())
        return f"{name}{found[2]}{text}\n\n"

    return MARKED.sub(again, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rewritten(path.read_text("utf-8")), "utf-8")
