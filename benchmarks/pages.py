"""The tables on the pages that come from results files.

    python benchmarks/pages.py     write them again, in README.md and docs

A table stands between the comments ``<!-- table: NAME -->`` and ``<!-- end -->``. Its name is a key
of ``TABLES``, or a results file of the race and a condition, such as ``race calm``. All other
figures are written by hand, and compared with the results by tests/benchmarks/test_pages.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import quality_simulated
from race import read_choices
from race_report import CALM, COLUMNS, Column, Run, Runs, cells, read, short
from support.finished_runs import FinishedRuns
from support.quality_rows import KINDS, RowName
from support.report import RESULTS, Spread, markdown_table

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(?<=<!-- table: )([\w ]+)( -->\n\n).*?(?=<!-- end -->)", re.DOTALL)

THOUSANDS = Column(
    "thousands of samples kept", "samples", ".0f", max, lambda run, *_: run.samples / 1e3
)
BY_KEY = {column.key: column for column in COLUMNS} | {THOUSANDS.key: THOUSANDS}
DETAILS = (
    "samples", "samples_ratio", "loss", "loss_ratio", "share_of_calm", "restart_s", "megabytes"
)  # fmt: skip
"""The columns of a condition's table, the first four with ranges; some have no figure there."""

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
    """Return the table of a condition: a line a row, most figures with their ranges."""
    runs, calm = stored(name)[of], stored(name).get(CALM, {})
    columns = [BY_KEY[key] for key in DETAILS if of != CALM or key != "share_of_calm"]
    lines = cells(runs, calm, columns, DETAILS[4:])
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
    return {row: text for row, (text,) in cells(runs, {}, [column], [key]).items()}


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
                "" if settings.checkpoint_steps is None else str(settings.steps_between_saves),
                "" if outer is None else "{:g}, {:g}".format(*outer),
                *waits,
            )
        )
    head = ("", "learning rate", "weight decay", "spares", "steps between saves")
    waits_of = ("dead after (s)", "time-out (s)", "waits for late ones (s)")
    return markdown_table((*head, "outer rate, momentum", *waits_of), lines)


def finished(name: str, seconds: float) -> list[Run]:
    """Return the runs of so many seconds in a file of finished runs."""
    runs = FinishedRuns(RESULTS / f"{name}.jsonl", Run, lambda run: run.settings.key)
    return [run for run in runs.known.values() if run.settings.seconds == seconds]


def tried(setting: str, kind: str, seconds: float) -> str:
    """Return the losses of calm runs by rate or decay: a line a row, the least one bold.

    Beside losses by rate stand the samples, in thousands.

    kind: of runs, for whose length the rows are tuned, as in ``race_choices.json``.
    """
    is_rate = setting == "learning_rate"
    other = "weight_decay" if is_rate else "learning_rate"
    found: dict[str, dict[float, Run]] = {}
    for row, choice in read_choices()[kind].items():
        for run in finished("race_tuning_55", seconds):
            settings = run.settings
            of = (settings.row, settings.condition, settings.waits, settings.outer)
            is_own = of == (row, CALM, kind != "without waits", choice.outer)
            if is_own and getattr(settings, other) == getattr(choice, other):
                found.setdefault(row, {})[getattr(settings, setting)] = run
    values = sorted(set().union(*found.values()), reverse=True)
    lines = []
    for row, runs in found.items():
        least = min(run.loss for run in runs.values())
        texts = dict.fromkeys(values, "")
        for value, run in runs.items():
            loss = f"**{run.loss:.3f}**" if run.loss == least else f"{run.loss:.3f}"
            texts[value] = f"{loss} ({run.samples / 1e3:.0f})" if is_rate else loss
        name = RowName.parse(row).label.removesuffix(", defaults")
        lines.append((name if is_rate else short(row), *texts.values()))
    return markdown_table((setting.replace("_", " "), *(f"{each:g}" for each in values)), lines)


Row: TypeAlias = dict[str, Any]
"""A row of a results file."""


@cache
def result(name: str) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return dict(contents.get("result", contents))  # older files have no frame


def above(row: Row, base: Row, figure: str = "loss") -> float:
    """Return by how many percent a row's figure lies above another's."""
    return float(100 * (row[figure] / base[figure] - 1))


def by_seed(row: Row, base: Row) -> str:
    """Return by how many percent each seed's loss lies above that of the other row."""
    shares = [loss / base["seeds"][seed] - 1 for seed, loss in row["seeds"].items()]
    return ", ".join(f"{100 * each:+.1f}" for each in shares)


FIGURES: dict[str, Callable[[Row, Row], str]] = {
    "bits a byte": lambda row, _: f"{row['loss']:.3f} ± {row['loss_std']:.3f}",
    "above DDP": lambda row, ddp: "" if row is ddp else f"{above(row, ddp):+.1f}%",
    "by seed": lambda row, ddp: "" if row is ddp else by_seed(row, ddp),
    "loss at equal time": lambda row, _: Spread.of(run["time"]["loss"] for run in row["runs"]).text(
        ".3f"
    ),
    "loss at equal tokens": lambda row, _: f"{row['loss']:.3f}",
    "exchanges a step": lambda row, _: f"{row['comm_rate']:.2f}",
    "bytes": lambda row, _: f"{row['bytes_per_parameter_step']:.2f}",
    "samples/s": lambda row, _: f"{row['samples_per_s']:,.0f}",
}
"""The columns of ``beside_ddp``: the text of a row, given DDP's."""


def label(row: str) -> str:
    """Return the name of a row; gossipdp's are bold."""
    name = RowName.parse(row)
    text = re.sub("^gossipdp, (?=gossip|a2cid2)", "", name.label)
    return f"**{text}**" if KINDS[name.kind].is_ours else text


def beside_ddp(first: str, figures: Sequence[str], *parts: tuple[str, str, str]) -> str:
    """Return a table of rows of quality.py or time_to_loss.py.

    Without headings the least of the first figure, a loss, is bold.

    Args:
        first: the head of the first column.
        figures: the other columns.
        parts: a results file, a heading (with values of the file), and the rows, some with a text
            of their own. DDP is that of the last file that has it.
    """
    lines: list[list[str]] = []
    ddp: Row = {}
    for file, heading, rows in parts:
        found = result(file)
        ddp = found["rows"].get("ddp", ddp)
        if heading:
            lines.append([f"**{heading.format_map(found)}**", *[""] * len(figures)])
        for each in rows.split("; "):
            name, _, text = each.partition(": ")
            shown = [FIGURES[figure](found["rows"][name], ddp) for figure in figures]
            lines.append([text or label(name), *shown])
    if not any(heading for _, heading, _ in parts):
        least = min(lines, key=lambda line: line[1])
        least[1] = f"**{least[1]}**"
    return markdown_table((first, *figures), lines)


def simulated(data: str, workers: int, steps: int) -> str:
    """Return the table of a simulated setting: the rows under AdamW as torch has it."""
    runs = quality_simulated.Runs(RESULTS / "quality_simulated.jsonl")
    setting = quality_simulated.Setting(data, workers, steps)
    (table,) = quality_simulated.tables(runs, setting)
    lines = [
        (name, f"{mean} ± {spread}", over, *others)
        for name, mean, over, spread, *others in table.rows
        if quality_simulated.ROWS[name].optimizer == "AdamW"
    ]
    return markdown_table([each for each in table.head if each != "spread"], lines)


RATES = ("exchanges a step", "bytes", "samples/s")
QUALITY = ("bits a byte", "above DDP", "by seed", *RATES)
STEPS, TIME = "{steps:,} steps", ": equal time {equal_time_s:.0f} s"
DEFAULTS = (
    ("quality_small_80ms_2048", STEPS,
     "ddp; ddp_bf16; gossipdp: **gossipdp, defaults (8-bit codes)**; "
     'gossipdp_full: gossipdp, `wire_format="full"`'),
    ("quality_small_80ms", STEPS, "ddp; gossipdp_auto: gossipdp, float32, the default then; "
     "gossipdp_auto_lattice8: the same, 8-bit codes; a2cid2: float32, `comm_rate=1`"),
)  # fmt: skip
BUSY = (
    "quality_small_busy", "", "ddp; ddp_bf16; "
    "gossipdp_shared: gossipdp, shared memory, as on one host; gossipdp: gossipdp, over TCP",
)  # fmt: skip
MILLION = (
    ("quality_large_card", "", "ddp; gossipdp: gossipdp, defaults of then"),
    ("quality_large_card_fixed", "", "gossip: gossip, asked for an exchange a step"),
    ("quality_large_busy", "",
     "gossipdp_shared: **gossipdp, defaults of today, two cores of one host**"),
)  # fmt: skip
REAL = (
    "quality_small", "", "gossip_lattice8@1/4; ddp_bf16; ddp; decent_dp; gossip; local_sgd@4; "
    "a2cid2; gossip_lattice8@3; local_sgd_bf16@8; diloco_gentle@16",
)  # fmt: skip
EQUAL_TIME = (
    ("time_to_loss_slow", f"One of four is four times slower{TIME}",
     "gossip; local_sgd_by_speed@8; ddp_bf16_by_speed"),
    ("time_to_loss_speeds", f"Speeds 8:4:2:1{TIME}",
     "local_sgd_by_speed@8; a2cid2; ddp_bf16_by_speed"),
    ("time_to_loss_equal", f"All equal, one machine{TIME}", "ddp; decent_dp; gossip"),
    ("time_to_loss_gigabit", f"Each behind 1 Gbit/s{TIME}",
     "decent_dp; a2cid2_lattice8@1/2; local_sgd@4; ddp_bf16; a2cid2"),
    ("time_to_loss_slow_link", f"Each behind 100 Mbit/s and 20 ms{TIME}",
     "gossip_lattice8@4; local_sgd_bf16@64"),
)  # fmt: skip
AT_EQUAL_TIME = ("samples/s", "loss at equal time", "loss at equal tokens", "bytes")

TABLES: dict[str, Callable[[], str]] = {
    "tuned": tuned,
    "decay": partial(tried, "weight_decay", "timed", 70.0),
    "long decay": partial(tried, "weight_decay", "long", 300.0),
    "busy rates": partial(tried, "learning_rate", "without waits", 300.0),
    "summary": summary,
    "rest samples": partial(rest, "samples"),
    "rest loss": partial(rest, "loss"),
    "simulated": partial(simulated, "common", 16, 1_000),
    "defaults": partial(beside_ddp, "three seeds", QUALITY, *DEFAULTS),
    "busy": partial(beside_ddp, "three seeds, 900 steps", QUALITY, BUSY),
    "million": partial(
        beside_ddp, "one seed", ("loss at equal tokens", "above DDP", *RATES), *MILLION
    ),
    "real": partial(beside_ddp, "three seeds", ("bits a byte", "above DDP", "bytes"), REAL),
    "equal time": partial(beside_ddp, "five rounds", AT_EQUAL_TIME, *EQUAL_TIME),
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
