"""``gossipdp demo``: real workers train a small model on real data, in about half a minute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from gossipdp.rules import shown_rate
from gossipdp_lab.console import say, table_of
from gossipdp_lab.demo import DemoArguments
from gossipdp_lab.demo.training import train, write_reports
from gossipdp_lab.demo.watch import fault_line


def check(arguments: DemoArguments) -> None:
    """Raise ValueError for invalid options; quick, without torch."""
    if arguments.compare:
        from gossipdp_lab.demo.compare import check_compare

        check_compare(arguments)
    if arguments.samples and arguments.seconds:
        raise ValueError("--samples and --seconds both say when the run ends; leave one out")
    if arguments.method == "allreduce" and arguments.fault_plan.kills:
        raise ValueError(
            "--faults kill with --method allreduce: there it ends the run; choose a2cid2, gossip "
            "or none"
        )
    if arguments.restart and not arguments.fault_plan.kills:
        raise ValueError(
            'kills belong to --restart, which starts killed workers again: --faults "kill 0 at 5s"'
        )

    from gossipdp.graph import build_graph

    build_graph(arguments.graph, arguments.workers)


def run(arguments: DemoArguments) -> int:
    """Train, show the results and write the files; return the exit status.

    Raises:
        ValueError: bad input; no process has started yet.
    """
    check(arguments)
    if arguments.compare:
        from gossipdp_lab.demo.compare import compare

        return compare(arguments)
    console = Console()
    training = train(arguments, console)
    words = training.metric_name.replace("_", " ")
    console.print(table_of([_row(worker, words) for worker in training.summary["workers"]]))
    lines = _lines(arguments, training.summary, words)
    lines += write_reports(arguments, training.run_log)
    lines += [f"[bold red]{problem}[/bold red]" for problem in training.problems]
    say(console, *lines, markup=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(training.summary, indent=2) + "\n", "utf-8")
        say(console, f"results: {arguments.json}")
    return 1 if training.problems else 0


def _row(worker: Mapping[str, Any], words: str) -> dict[str, str]:
    metric = worker["metric_before_average"]
    return {
        "worker": str(worker["rank"]),
        "gradient steps": f"{worker['gradient_steps']:,}",
        "samples/s": f"{worker['samples_per_second']:,.0f}",
        "exchanges": f"{worker['exchanges']:,}",
        "waited (s)": f"{worker['waited_seconds']:.2f}",
        f"{words} before averaging": "killed" if metric is None else f"{metric:.4f}",
    }


def _lines(arguments: DemoArguments, summary: dict[str, Any], words: str) -> list[str]:
    steps = [worker["gradient_steps"] for worker in summary["workers"]]
    metric = summary[words.replace(" ", "_")]
    lines = [
        f"{words} of the averaged model: [bold]{metric:.4f}[/bold]",
        f"trained {summary['train_seconds']:.1f} s on {summary['samples']:,} samples; gradient "
        f"steps of the slowest and the fastest worker: {min(steps):,} and {max(steps):,}",
    ]
    if arguments.method in ("a2cid2", "gossip") and len(steps) > 1:
        lines.append(
            f"achieved comm rate: {summary['achieved_comm_rate']:.3f} exchanges per worker per "
            f"gradient step, asked for {shown_rate(arguments.comm_rate)}"
        )
    lines.append(
        f"consensus distance just before averaging: {summary['consensus_distance']:.3g}; "
        f"waited: {sum(worker['waited_seconds'] for worker in summary['workers']):.2f} s in all"
    )
    return lines + [fault_line(each) for each in summary.get("faults", ()) if "missed" not in each]
