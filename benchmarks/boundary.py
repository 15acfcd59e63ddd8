"""The cost of a step boundary that carries an exchange, beside the optimizer's step.

    python benchmarks/boundary.py                  writes benchmarks/results/boundary.{json,md}
    python benchmarks/boundary.py --json PATH      writes the figures to PATH alone

A model of 117 million parameters (GPT-2's shapes) takes AdamW steps in this process, in turn alone,
as with method none, and with the boundary after it, for which an exchange left its part: flow, and
x += pending, of every chunk under its lock. What the wrapper does besides at each step does not
grow with the model; overlap.py measures it. Wants 7 GB of memory and a quiet machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import tyro
from support.provenance import Provenance
from support.report import Report, Spread, Table, run_script
from torch import Tensor

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.device import zeros
from gossipdp.dynamics.state import Segment, State
from gossipdp.parallel.flat_parameters import chunk_bytes_for
from gossipdp.rules import at_least_1, check_flags, option, output_file

ETA, ALPHA_TILDE = 0.3, 1.3
"""Those of a ring of about ten; their values do not change how long it takes."""


@dataclass(frozen=True)
class BoundaryBenchmark:
    """Measure what a boundary that carries an exchange adds to the optimizer's step."""

    width: int = option(768, at_least_1)
    """Width of the transformer."""

    layers: int = option(11, at_least_1)
    """Its layers: with width 768 and GPT-2's vocabulary 117 million parameters are 11 layers, and
    embeddings that the output shares."""

    rounds: int = option(9, at_least_1)
    """Rounds of two steps: alone, and with the boundary. One more goes before, uncounted."""

    json: Path | None = option(None, output_file)
    """Write the results to this file instead of benchmarks/results."""

    quick: bool = False
    """A small model and few rounds, to see that it works; results go to runs/benchmarks."""


def main() -> None:
    benchmark = tyro.cli(BoundaryBenchmark, config=(tyro.conf.FlagCreatePairsOff,))
    report = Report("boundary", "A boundary that carries an exchange", quick=benchmark.quick)
    result = measure(benchmark)
    report.tables.append(
        Table(
            f"{result['parameters']:,} parameters, AdamW, {result['threads']} threads",
            ("", "ms"),
            [
                (name, Spread.of(result[f"{key}_runs_ms"]).text(".1f"))
                for name, key in (
                    ("optimizer's step alone", "step"),
                    ("step and boundary", "both"),
                )
            ],
            f"Medians of {result['rounds']} interleaved rounds (least to greatest), one more "
            f"uncounted. The boundary flows and adds {result['chunks']} chunks, by "
            f"{result['kernels']}.",
        )
    )
    report.write(result, benchmark.json)


def measure(benchmark: BoundaryBenchmark) -> dict[str, Any]:
    """All figures, as ``--json`` writes them.

    Raises:
        ValueError: There is nothing to measure.
    """
    check_flags(benchmark)
    started_s = time.monotonic()
    width, layers, rounds = benchmark.width, benchmark.layers, benchmark.rounds
    if benchmark.quick:
        width, layers, rounds = 64, 2, 2
    shapes = gpt_shapes(width, layers)
    training = Training(shapes)
    turns: list[tuple[str, Callable[[], float]]] = [
        ("step", training.step),
        ("both", training.step_with_boundary),
    ]
    found_s: dict[str, list[float]] = {name: [] for name, _ in turns}
    for _ in range(rounds + 1):
        for name, turn in turns:
            found_s[name].append(turn())
        # Each finds what the one before has left in the caches: they take turns.
        turns.append(turns.pop(0))
    counted_s = {name: seconds[1:] for name, seconds in found_s.items()}
    step_s, both_s = (statistics.median(seconds) for seconds in counted_s.values())
    return {
        "ratio": both_s / step_s,
        "ratio_by_round": [
            both / step for both, step in zip(counted_s["both"], counted_s["step"], strict=True)
        ],
        **{f"{name}_ms": 1e3 * statistics.median(runs) for name, runs in counted_s.items()},
        **{f"{name}_runs_ms": [1e3 * each for each in runs] for name, runs in counted_s.items()},
        "parameters": sum(map(torch.Size.numel, shapes)),
        "chunks": len(training.state.chunks),
        "kernels": training.state.kernels,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "provenance": msgspec.structs.asdict(Provenance.here(time.monotonic() - started_s)),
    }


def gpt_shapes(width: int, num_layers: int) -> list[torch.Size]:
    """Return a GPT's shapes: embeddings of 50,257 tokens and 1,024 places, and its layers."""
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    layer += [(3 * width,), (width,), (4 * width,), (width,), *[(width,)] * 4]
    vocabulary = 50_257 if width >= 512 else 1_000
    shapes = [(vocabulary, width), (1_024, width), *layer * num_layers, (width,), (width,)]
    return [torch.Size(shape) for shape in shapes]


class Training:
    """A model's parameters as views of flat storage, AdamW on them, and a worker's state."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        num_values = sum(shape.numel() for shape in shapes)
        generator = torch.Generator().manual_seed(0)

        def random() -> Tensor:
            return torch.randn(num_values, generator=generator)

        x = zeros(num_values, torch.float32, torch.device("cpu")).copy_(random())
        gradients = random()
        parts = [shape.numel() for shape in shapes]
        self._parameters = []
        for shape, values, gradient in zip(
            shapes, x.split(parts), gradients.split(parts), strict=True
        ):
            parameter = torch.nn.Parameter(values.view(shape))
            parameter.grad = gradient.view(shape)
            self._parameters.append(parameter)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-6)
        segment = Segment(x, Role.TRAINED, chunk_bytes=chunk_bytes_for(x.nbytes))
        self.state = State([segment])
        self.state.compile()
        self._chunks = [
            (chunk, snapshot, peer)
            for (chunk, snapshot), (_, peer) in zip(
                segment.split(torch.empty(num_values)), segment.split(random()), strict=True
            )
        ]
        self._theta = 0.0

    def _exchange(self) -> None:
        self._theta += ETA
        for chunk, snapshot, peer in self._chunks:
            chunk.snapshot_and_exchange(self._theta, snapshot, peer, ALPHA_TILDE)
        self._theta += 0.5 * ETA

    def step(self) -> float:
        """Seconds of a step with nothing after it."""
        started_s = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - started_s

    def step_with_boundary(self) -> float:
        """Seconds of a step and the boundary after it; an exchange has gone before, untimed."""
        self._exchange()
        started_s = time.perf_counter()
        self._optimizer.step()
        self.state.boundary(self._theta)
        return time.perf_counter() - started_s


if __name__ == "__main__":
    run_script(main)
