"""The paper's figures and claims, measured by the simulator and written to one page.

    python benchmarks/reproduce.py                    measure everything, rewrite the page in docs
    python benchmarks/reproduce.py --only mixing,pairing measure these; the others stay as stored
    python benchmarks/reproduce.py --rewrite          measure nothing; draw and write the page again
    python benchmarks/reproduce.py --quick            tiny settings, into runs/reproduction

Source of the figures reproduced: Nabli, Belilovsky, Oyallon, 2023, arXiv 2306.08289. Each section
is a module of the folder reproduction: ``measure`` gives a structure that is stored as JSON beside
the figure, ``draw`` and ``write`` make figure and text from that structure alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
from reproduction import invariant, mixing, pairing, training
from reproduction.parts import FIGURE, table
from support.provenance import Provenance, commit_here
from support.report import run_script

DOCS = Path(__file__).parents[1] / "docs"
QUICK_OUTPUT = Path("runs/reproduction")
"""Quick runs show nothing, so they never overwrite what is committed."""

SECTIONS: dict[str, ModuleType] = {
    "mixing": mixing,
    "training": training,
    "pairing": pairing,
    "invariant": invariant,
}
"""In the order of the page."""


_SUMMARY = table(
    ("result", "here"),
    [
        (
            "how communications on the star, the ring and the complete graph grow with the number "
            "of workers",
            "holds: our rates are consistent with it ([1](#1-communications-to-agree))",
        ),
        (
            "figure 1: on a ring of 64, A2CiD2 acts like doubling the comm rate",
            "the consensus distance: holds, with a small network; the losses on ImageNet: not "
            "tried; on rings of 4 to 32, which the paper does not show, it mostly differs "
            "([2](#2-training-on-rings))",
        ),
        (
            "ResNet-18 on CIFAR-10: losses and accuracies; ResNet-50 on ImageNet: accuracies",
            "not tried ([recipes](recipes.md)); a ResNet-8 on Fashion-MNIST: distances nearly "
            "hold, accuracies differ ([images](#on-real-images))",
        ),
        (
            "training times on up to 64 GPUs; steps of the slowest and the fastest of 64",
            "not tried",
        ),
        (
            "ours: pairing with any worker that is free stops the mixing on slow links",
            "holds ([3](#3-pairing))",
        ),
        (
            "ours: our exchanges keep the mean of [x + c/2]"
            "(concepts.md#where-we-depart-from-the-paper-and-why); those of the authors' released "
            "code do not",
            "holds ([4](#4-the-invariant))",
        ),
    ],
    num_left=2,
)
"""Result by result; the sections' verdicts are computed, so hold this against them."""

ON_IMAGES = (
    "## On real images",
    "`python benchmarks/paper_images.py` repeats the paper's experiment on "
    "Fashion-MNIST (`apt-get install dataset-fashion-mnist`): a ResNet-8, and the paper's settings "
    "but for batches of 32, not 128, and 4 epochs, not 300. 16 workers are simulated, with three "
    "seeds.",
    "- **Nearly holds**: with A2CiD2 workers on the ring are half as far apart as with plain "
    "gossip, 0.99 to 1.15 times as far as with twice the exchanges (the paper's figures 1 and 2).",
    "- **By the simulator's clock** both take 0.79 of the time of all-reduce that sends after the "
    "gradient, and 0.50 if one worker is 2 times slower.",
    "- **Differs**: after 4 epochs gossip and A2CiD2 with equal workers are 2.5 to 3.7 points less "
    "accurate than all-reduce.",
    "- **Four real processes** (`--real`), batches of 128, two seeds: all-reduce 80.6%, A2CiD2 on "
    "the ring 83.5%, gossip 83.7%. A2CiD2's workers are 2.6 times as far apart as with twice the "
    "exchanges. Do not compare these accuracies with the table's: here BatchNorm's statistics are "
    "as trained, there computed anew.",
    "- **Not tried**: 300 epochs, each row's own learning rate, 64 workers, CIFAR-10 and ImageNet.",
)
"""Ends the page, with the first table of the benchmark's results."""
IMAGES = Path(__file__).parent / "results" / "paper_images.md"
IMAGE_COLUMNS = ("", "test accuracy, %", "training loss", "consensus distance", "exchanges a step")
"""Of that table; the results have the others."""


class Stored(msgspec.Struct, frozen=True):
    """One section's result, to be decoded as that section's own type."""

    section: str
    quick: bool
    provenance: Provenance
    result: msgspec.Raw


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--rewrite", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="tiny settings, about a minute")
    options = parser.parse_args(words)
    output = QUICK_OUTPUT if options.quick else DOCS
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    print(f"page: {reproduce([] if options.rewrite else names, output, options.quick)}")


def reproduce(names: Sequence[str], directory: Path, quick: bool = False) -> Path:
    """Measure the sections called ``names``, then draw and write the page from all that is stored.

    Args:
        names: keys of :data:`SECTIONS`; the others keep what was stored in ``directory`` before.
        directory: of the page; figures and results go to ``figures`` in it.
        quick: with tiny settings, to see that everything works; the page says so.

    Raises:
        ValueError: there is no such section, or its figures would stand in docs without a commit
            that has the code they were measured by.
    """
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"there is no section {name!r}; choose among {', '.join(SECTIONS)}")
    if names and directory == DOCS and commit_here().endswith("+"):
        raise ValueError(
            "src or benchmarks have changes that are not committed, so that no commit has the code "
            "of these figures: commit them first"
        )
    (directory / "figures").mkdir(parents=True, exist_ok=True)
    for name in names:
        started = time.perf_counter()
        result = SECTIONS[name].measure(quick)
        provenance = Provenance.here(time.perf_counter() - started)
        stored = Stored(name, quick, provenance, msgspec.Raw(msgspec.json.encode(result)))
        encoded = msgspec.json.format(msgspec.json.encode(stored), indent=1)
        _path(directory, name, "json").write_bytes(encoded + b"\n")
    page = directory / "reproduction.md"
    page.write_text("\n\n".join(_blocks(directory)) + "\n", "utf-8")
    return page


def read_stored(directory: Path, name: str) -> Stored | None:
    """Return the stored result of a section; None where there is none."""
    path = _path(directory, name, "json")
    return msgspec.json.decode(path.read_bytes(), type=Stored) if path.exists() else None


def _path(directory: Path, name: str, ending: str) -> Path:
    return directory / "figures" / f"reproduction-{name}.{ending}"


def _blocks(directory: Path) -> list[str]:
    sections = []
    for number, (name, section) in enumerate(SECTIONS.items(), start=1):
        sections += [f"## {number}. {section.TITLE}", *_section(directory, name, section)]
    return [
        "# The paper's results, reproduced",
        "The paper is [A2CiD2](https://arxiv.org/abs/2306.08289) (Nabli, Belilovsky, Oyallon, "
        "NeurIPS 2023). No GPU and none of its data was used. All runs are simulated, except four "
        "processes on images. [How it works](concepts.md) explains the words. ± is the standard "
        "deviation over seeds. `benchmarks/reproduce.py` writes this page.",
        _SUMMARY,
        *sections,
        *ON_IMAGES,
        _image_table(),
        "<sub>What the columns mean, and all times: `benchmarks/results/paper_images.md`.</sub>",
    ]


def _image_table() -> str:
    text = next(block for block in IMAGES.read_text().split("\n\n") if block.startswith("|"))
    head, _, *rows = (line[2:-2].split(" | ") for line in text.splitlines())
    places = [head.index(column) for column in IMAGE_COLUMNS]
    return table(IMAGE_COLUMNS, [[row[place] for place in places] for row in rows])


def _section(directory: Path, name: str, section: ModuleType) -> list[str]:
    stored = read_stored(directory, name)
    if stored is None:
        return [f"*Not run yet: `python benchmarks/reproduce.py --only {name}`.*"]
    result = msgspec.json.decode(stored.result, type=section.Result)
    section.draw(result, _path(directory, name, "png"))
    figure = f"![{section.TITLE}](figures/reproduction-{name}.png)"
    by = stored.provenance
    blocks = [figure if block == FIGURE else block for block in section.write(result)]
    if stored.quick:
        blocks.insert(
            0,
            "> **Quick run.** Tiny settings, to see that everything works: these numbers show "
            "nothing, and the verdict counts for nothing.",
        )
    blocks.append(
        f"<sub>{by.code[0].upper()}{by.code[1:]}, {by.seconds:.0f} s. Data, settings and hardware: "
        f"[JSON](figures/reproduction-{name}.json).</sub>"
    )
    return blocks


if __name__ == "__main__":
    run_script(main)
