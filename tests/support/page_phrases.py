"""The figures on the pages, made of the results files.

``PHRASES`` has what each page says beside the tables that pages.py writes. A run that changes a
figure changes its phrase, and test_pages.py fails until the page says it.
"""

from collections.abc import Iterable
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from pages import SUMMARY, Row, above, finished, result, stored
from quality_simulated import ROWS, Runs, Setting, paired_difference, result_of
from race_report import ours_over
from support.finished_runs import loss_of
from support.report import RESULTS, Spread


def rows(name: str) -> dict[str, Row]:
    return result(name)["rows"]


def cells(name: str, *first: str) -> list[str]:
    """Return the other cells of a line of the results' Markdown."""
    start = "| " + " | ".join(first) + " | "
    lines = (RESULTS / f"{name}.md").read_text("utf-8").splitlines()
    (line,) = {line.removeprefix(start) for line in lines if line.startswith(start)}
    return line.rstrip(" |").split(" | ")


def medians(name: str, *first: str) -> list[str]:
    return [text.partition(" (")[0] for text in cells(name, *first)]


def bounds(values: Iterable[float], form: str = ".0f") -> str:
    """Return the least and the greatest, or one of them where they read the same."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{each:{form}}" for each in (found[0], found[-1])))


def more(figure: float, than: float) -> float:
    """Return by how many percent one figure is greater than the other."""
    return 100 * (figure / than - 1)


# The race

RACE, WORST = result("race"), "kills10_moving"


def below(condition: str, row: str, name: str = "race_busy") -> float:
    """Return by how many percent gossipdp's loss is below a row's: the median over the rounds."""
    return 100 * (1 - result(name)[condition][row]["loss_ratio"])


def each_below(condition: str, row: str) -> list[float]:
    """Return by how many percent gossipdp's loss is below a row's in each round without waits."""
    runs = stored("race_busy")[condition]
    return [100 * (1 - ours_over("loss", run, (), runs["gossipdp"])) for run in runs[row]]


LONG = {
    (run.settings.condition, run.settings.row): run.loss
    for run in finished("race_55", 300.0)
    if run.settings.weight_decay == 0.1
}
OF_70_S = {
    (run.settings.row, run.settings.seed): run.loss
    for run in finished("race_55", 70.0)
    if run.settings.condition == "calm"
}
EARLIER = median(
    more(loss, OF_70_S["ddp", seed]) for (row, seed), loss in OF_70_S.items() if row == "gossipdp"
)
CALM, BOTH = (f"{more(LONG[each, 'gossipdp'], LONG[each, 'ddp']):.0f}" for each in ("calm", WORST))
BELOW, BELOW_DILOCO = (
    f"{below(WORST, row, 'race_300'):.1f}" for row in ("ddp", "diloco_torchft@16")
)
WITHOUT_WAITS = [below("calm", row) for row in ("ddp", "ddp_bf16")]
TRIED = finished("race_tuning_55", 100.0)
AFTER_100_S = {
    row: min(run.loss for run in TRIED if run.settings.row == row) for row in ("ddp", "gossipdp")
}
IN_CALM = [[run["result"]["loss"] for run in row["runs"]] for row in RACE["calm"].values()]
KEPT = [
    min(found["samples_ratio"] for row, found in RACE[name].items() if "torchft" in row)
    for name in ("moving", "kills10", WORST)
]


def times_ddp(*names: str) -> list[float]:
    """Return the bytes of rows over DDP's, of all conditions of the README."""
    return [
        RACE[name][row]["megabytes"] / RACE[name]["ddp"]["megabytes"]
        for name in SUMMARY
        for row in names
    ]


# Quality

SMALL, IDLE, SHORT, BUSY, LARGE, FIXED, TODAY, AUTO, ONCE, RING = (
    rows(f"quality_{name}")
    for name in (
        "small", "small_80ms_2048", "small_80ms", "small_busy", "large_card", "large_card_fixed",
        "large_busy", "auto", "auto_exponential", "auto_ring",
    )
)  # fmt: skip
ABOVE_ONCE = [
    above(AUTO["gossipdp"], ONCE["a2cid2"]),
    above(AUTO["gossipdp_lattice8"], ONCE["a2cid2"]),
    above(RING["gossipdp_lattice8"], RING["a2cid2"]),
]
DDP, OURS, BYTES = IDLE["ddp"], IDLE["gossipdp"], "bytes_per_parameter_step"
GAP, SHARE = f"{above(OURS, DDP):.1f}", f"{OURS[BYTES] / DDP[BYTES]:.0%}"
BF16 = f"{-above(IDLE['ddp_bf16'], DDP):.1f}"
ON_HOST, TCP = (above(BUSY[row], BUSY["ddp"]) for row in ("gossipdp_shared", "gossipdp"))
ON_CPU = f"{above(TODAY['gossipdp_shared'], LARGE['ddp']):.0f}"
ON_GPU, AT_TWO = (f"{above(row, LARGE['ddp']):.0f}" for row in (LARGE["gossipdp"], FIXED["gossip"]))
SELDOM = f"{1 / LARGE['gossipdp']['comm_rate']:.0f}"
AT_1024 = more(*(min(LARGE[row]["tried"].values()) for row in ("gossipdp", "ddp")))
OF_64 = {
    (run["graph"], run["seed"]): run for run in result("graphs")["runs"] if run["workers"] == 64
}
RUNS, OF_FOUR = Runs(RESULTS / "quality_simulated.jsonl"), Setting("disjoint", 4, 900)
ONE, FOUR = (f"gossipdp, {number} exchange{'s' * (number > 1)} a step" for number in (1, 4))
CODED = "gossipdp, 1 exchange a step, lattice8"
UNCODED = RUNS.of(row=CODED.removesuffix(", lattice8"), **asdict(OF_FOUR))


def above_ddp(kind: str) -> list[float]:
    return [above(row, SMALL["ddp"]) for name, row in SMALL.items() if name.startswith(kind)]


def simulated(row: str, base: str = "all-reduce", workers: int = 16, steps: int = 1_000) -> float:
    """Return by how many percent a row ends above another, over the seeds of both."""
    setting = Setting("common", workers, steps)
    both = zip(*(result_of(RUNS, name, setting) for name in (row, base)), strict=False)
    ours, theirs = zip(*([run["loss"] for run in pair] for pair in both), strict=True)
    return more(fmean(ours), fmean(theirs))


BY_DEFAULT = [
    bounds([simulated(row, steps=steps) for steps in (512, 2048)], ".1f") for row in (ONE, FOUR)
]
HALVED = [
    more(tried[best / 2], tried[best])
    for setting in RUNS.settings()
    for name, row in ROWS.items()
    for known in [RUNS.of(row=name, seed=0, **asdict(setting))]
    for tried in [{run["learning_rate"]: loss_of(run) for run in known}]
    for best in [min(tried, key=tried.get, default=0)]
    if (setting.workers, row.optimizer) == (16, "AdamW") and row.method in ("gossip", "a2cid2")
    if best / 2 in tried
]
ADAM_95 = [
    simulated(f"gossip, beta_2 0.95{v}", "all-reduce, beta_2 0.95") for v in ("", ", v every 5th")
]
MUON = [simulated(f"gossip, Muon{v}", "all-reduce, Muon") for v in ("", ", v every 16th")]

# Loss at equal time

CONDITIONS, IN_TIME = ("equal", "gigabit", "slow_link", "slow", "speeds"), "loss_at_equal_time"
TIME = {name: rows(f"time_to_loss_{name}") for name in CONDITIONS}
NOW = {name: rows(f"time_to_loss_defaults_{name}") for name in (*CONDITIONS, "jitter")}
OFF_TIME = max(
    abs(run["time"]["curve"][-1]["seconds"] / result(f"time_to_loss_{name}")["equal_time_s"] - 1)
    for name in CONDITIONS
    for row in TIME[name].values()
    for run in row["runs"]
    if len(row["runs"]) > 1
)
LOSSES = [
    [run["time"]["loss"] for run in row["runs"]] for each in NOW.values() for row in each.values()
]


def after_512(kind: str) -> list[float]:
    """Return how far rows end above the plainest DDP of their condition at equal tokens."""
    return [
        above(row, next(other for name, other in each.items() if name.startswith("ddp")))
        for each in TIME.values()
        for name, row in each.items()
        if name.partition("@")[0] == kind
    ]


def in_all(kind: str, row: str) -> str:
    """Return the same of all runs, a row of the simulated ones among them."""
    return bounds([simulated(row), *above_ddp(kind), *after_512(kind)])


ONE_SLOW = TIME["slow"]["gossip"], TIME["slow"]["local_sgd_by_speed@8"]
RIVAL = "local_sgd_bf16@64"


def beside(name: str, row: str, figure: str = IN_TIME) -> float:
    """Return how far the defaults end above another row."""
    return above(NOW[name]["gossipdp"], NOW[name][row], figure)


def now(name: str, row: str) -> str:
    return f"{NOW[name][row][IN_TIME]:.3f}"


AFTER_512 = above(SHORT["gossipdp_auto_lattice8"], SHORT["ddp"]), beside("equal", "ddp", "loss")
BEHIND_DDP = [
    above(TIME["equal"][row], TIME["equal"]["ddp"], IN_TIME) for row in ("decent_dp", "gossip")
]
OVER_FIXED = [beside("slow", "gossip"), beside("speeds", "a2cid2"), beside("jitter", "gossip")]

# Performance

CORE, TINY = "resnet18-shared-core", "launch-bound"
IN_MEMORY, BY_TCP = (
    medians("exchange", "1,000,000", *form)[0]
    for form in (("shared memory", "full"), ("TCP", "lattice8"))
)


def steps(file: str, loop: str) -> Spread:
    """Return the steps/s with exchanges over those without."""
    found = result(file)[loop]["rate_over"]
    return Spread.of(found.get("none", found)["values"])


def steps_at(file: str, loop: str) -> str:
    rate = result(file)[loop]["arms"]["a2cid2"]["achieved_comm_rate"]
    return f"{steps(file, loop).text()} [{rate:.2g}]"


LOST, LOST_TINY, *LOST_LIMITED = (
    100 * (1 - steps(*each).median)
    for each in (
        ("overlap_auto", CORE), ("overlap_auto", TINY),
        ("overlap_auto_limited", TINY), ("overlap_auto_limited", "resnet18"),
    )
)  # fmt: skip


def memory(name: str) -> str:
    return " | ".join(medians("memory", name))


MEMORY = [rows("memory")[name] for name in ("gossip", "a2cid2", "a2cid2-numba")]
STARTUP = result("startup")
NOTICED = STARTUP["noticed_s"]
SPARE = f"{round(STARTUP['spare_mb']['median'], -1):.0f} MB"
ON_CARD = {
    (name, workers, rate): [
        [float(text) for text in medians("card", f"{name}, {workers} workers, {how}")[:4]]
        for how in ("none", f"gossip, comm rate {rate}")
    ]
    for name, workers, rate in (
        ("gpt", 2, "auto"), ("gpt", 2, "1.0"), ("gpt", 4, "auto"),
        ("resnet18", 2, "auto"), ("resnet18", 4, "auto"),
    )
}  # fmt: skip
CARD_MS = [
    1e3 * n * (1 / ours[0] - 1 / plain[0]) / ours[1] for (_, n, _), (plain, ours) in ON_CARD.items()
]
GPT = [both for key, both in ON_CARD.items() if key[:2] == ("gpt", 2)]
CARD_LOST = [-more(ours[0], plain[0]) for key, (plain, ours) in ON_CARD.items() if key[2] == "auto"]


def on_card(*key: Any) -> str:
    (plain, *_), (ours, rate, *_) = ON_CARD[key]
    return f"{plain:.1f} | {ours:.1f} | {ours / plain:.2f} | {rate:.2f} |"


# Adapters, bytes, faults, shards

SPEEDS, EIGHT, FLOATS, KILLED = (
    "local SGD, steps by speed, H = 16", "gossipdp, defaults, lattice8", "gossipdp, defaults",
    "gossipdp, defaults, one killed",
)  # fmt: skip


def lora(name: str) -> str:
    _, loss, *_ = cells("adapters", name)
    return " | ".join([loss, *medians("adapters", name)[2:]])


BY_SPEED, IN_CODES = (
    [float(text) for text in medians("adapters", name)] for name in (SPEEDS, EIGHT)
)
CODED_ROWS = [OURS, BUSY["gossipdp"], *(NOW[name]["gossipdp"] for name in CONDITIONS[:3])]
AT_HOME = [sum(run["sent_bytes"]) / sum(run["exchanges"]) for run in rows("adapters")[EIGHT]]
LEAST_BYTES = min(row[BYTES] / row["comm_rate"] for row in CODED_ROWS)
BACK_S = " and ".join(f"{run['back_s']:.1f}" for run in rows("adapters")[KILLED])
AN_EXCHANGE = f"{LEAST_BYTES:.1f} to {max(AT_HOME) / 262_144:.2f}"
EVENTS = ("stop", "slow 16", "kill", "first step", "join")
*AT_ONE, JOIN = (float(medians("independence_real", each, "1")[1]) for each in EVENTS)
*AT_AUTO, JOIN_AUTO = (float(medians("independence_real_auto", each)[1]) for each in EVENTS)
AS_THREE = [*AT_ONE, *AT_AUTO]
FAULTS = result("independence")["rows"]
IN_ALL = [row["all"]["median"] for row in FAULTS]
SINGLE = [row["least"]["median"] for row in FAULTS]
TRAINED = stored("race_16")[WORST]["gossipdp"][0]
SOAK, MANY, LARGEST = result("soak")["counts"], result("many"), result("large")["command"]
GOSSIP_SLOW, HSDP_SLOW, GOSSIP_EQUAL, HSDP_EQUAL = (
    [float(text) for text in medians("shards", f"{method}, {replicas}")[:2]]
    for replicas in ("one replica 4 times slower", "equal")
    for method in ("gossip", "HSDP")
)

PHRASES = {
    "README.md": [
        f"gossipdp sent {bounds(times_ddp('gossipdp'), '.1f')} times DDP's bytes",
        f"at most {max(times_ddp('local_sgd_torchft@16', 'diloco_torchft@16')):.2f} times.",
        f"both {BELOW}% below it and {BELOW_DILOCO}% below DiLoCo (three runs).",
        f"ended {WITHOUT_WAITS[0]:.1f}% below DDP ({bounds(each_below('calm', 'ddp'), '.1f')}%), "
        f"{WITHOUT_WAITS[1]:.1f}% below its bf16 hook "
        f"({bounds(each_below('calm', 'ddp_bf16'), '.1f')}%); with kills and less of one core "
        f"{below('starved', 'ddp'):.0f}% below DDP ({bounds(each_below('starved', 'ddp'))}%;",
        f"{GAP}% above it after 2,048 steps with an idle core, {bounds(AFTER_512)}% after 512; "
        f"{ON_HOST:.0f} to {TCP:.0f}% with busy cores; on a GPU {ON_GPU}%, "
        f"with an exchange in {SELDOM} steps, the default then.",
        f"trained with at most {TRAINED.settings.workers} workers",
    ],
    "docs/race.md": [
        f"gossipdp ended {EARLIER:.1f}% above DDP in the calm of 70 s",
        f"{CALM}% above it in the calm ({LONG['calm', 'gossipdp']:.3f} and "
        f"{LONG['calm', 'ddp']:.3f}), and {BOTH}% above it with both faults "
        f"({LONG[WORST, 'gossipdp']:.3f} and {LONG[WORST, 'ddp']:.3f}).",
        "DDP ended at {ddp:.3f} bits a byte, gossipdp at {gossipdp:.3f}:".format(**AFTER_100_S),
        f"Runs of one row differ by {max(more(max(each), min(each)) for each in IN_CALM):.0f}%,",
    ],
    "docs/comparison.md": [
        f"**DiLoCo**: {in_all('diloco', 'DiLoCo, H = 16, momentum 0.5')}%",
        f"**local SGD**: {in_all('local_sgd', 'local SGD, H = 16')}%",
        f"**Decent-DP**: {bounds(above_ddp('decent_dp'))}% after 2,048 steps, "
        f"{bounds(after_512('decent_dp'))}% after 512",
        f"with an idle core {above(OURS, DDP):.0f}% after 2,048 steps, "
        f"{bounds(AFTER_512)}% after 512; else "
        f"{bounds([ON_HOST, TCP, AT_1024])}%",
        f"it kept {KEPT[0]:.1f} times the samples of torchft's best row",
        f"{KEPT[1]:.2f} times where one dies every 10 s, {KEPT[2]:.1f} times with both",
        f"it ends {more(RACE['calm']['ddp']['loss_ratio'], 1):.1f}% above DDP's",
        f"{more(BY_SPEED[1], IN_CODES[1]):.1f}% below local SGD, at "
        f"{IN_CODES[5] / BY_SPEED[5]:.0f} times its bytes",
    ],
    "docs/quality.md": [
        f"{GAP}% above DDP after 2,048 steps, at {SHARE} of its bytes.",
        f"bf16 hook ends {BF16}% below DDP",
        f"[{ON_HOST:.0f}% above DDP](#where-all-cores-are-busy) on one host, {TCP:.0f}% over TCP",
        f"end {ON_CPU}% above on one host, and {ON_GPU}% on a GPU, with an exchange in "
        f"{SELDOM} steps, the default then.",
        f"end {BY_DEFAULT[0]}% above all-reduce with one exchange a step, {BY_DEFAULT[1]}% with "
        "four (512 and 2,048 steps);",
        f"64 workers {simulated(FOUR, workers=64):.1f}% with four",
        f"[{bounds(above_ddp('gossip_lattice8@3'), '.1f')}% above DDP](#with-real-processes)",
        f"as many bytes, {bounds(above_ddp('local_sgd_bf16'), '.1f')}%",
        f"that put gossipdp {CALM}% above DDP (one run)",
        f"was seen: {paired_difference(result_of(RUNS, CODED, OF_FOUR), UNCODED)}, a 95% interval",
        f"the defaults of the time were {AT_1024:.0f}% above DDP",
        f"at beta_2 = 0.95 this lowers the gap by {ADAM_95[0] - ADAM_95[1]:.1f} points",
        f"it ends {fmean(above(OF_64['ring', x], OF_64['complete', x]) for x in (0, 1)):.1f}%",
        f"SGD ends {simulated('gossip, SGD', 'all-reduce, SGD'):.1f}% above all-reduce",
        f"Muon {bounds(MUON, '.1f')}%",
        f"Adafactor {simulated('gossip, Adafactor', 'all-reduce, Adafactor'):.1f}%.",
    ],
    "docs/install.md": [
        f"by {ON_GPU}% with an exchange in {SELDOM} steps, the default then, by {AT_TWO}% with "
        f"an exchange in {1 / FIXED['gossip']['comm_rate']:.0f} steps.",
    ],
    "docs/from_ddp.md": [
        f"with an idle core {GAP}% after 2,048 steps, {bounds(AFTER_512)}% after 512;",
        f"with busy cores {ON_HOST:.0f}% on one host, {TCP:.0f}% over TCP",
        f"on one host {ON_CPU}%; on one GPU {ON_GPU}% with an exchange in {SELDOM} steps, the "
        f"default then, {AT_TWO}% with one in {1 / FIXED['gossip']['comm_rate']:.0f}.",
        f"and {bounds(row['constant_mb'] for row in MEMORY)} MB a process",
    ],
    "docs/equal_time.md": [
        f"at the same time, within {OFF_TIME:.0%}.",
        f"gossip leads (by {-above(*ONE_SLOW, IN_TIME):.1f}%;",
        "DDP leads Decent-DP by {:.1f}% and gossip by {:.1f}%".format(*BEHIND_DDP),
        f"{now('equal', 'gossipdp')}, {beside('equal', 'ddp'):.1f}% above DDP "
        f"({now('equal', 'ddp')}), with {NOW['equal']['gossipdp'][BYTES]:.1f} bytes to its "
        f"{NOW['equal']['ddp'][BYTES]:.1f}.",
        f"{now('gigabit', 'gossipdp')}, level with DDP's bf16 hook ({now('gigabit', 'ddp_bf16')})",
        f"{now('slow_link', 'gossipdp')}, {beside('slow_link', RIVAL):.1f}% above local",
        f"H = 64 ({now('slow_link', RIVAL)})",
        f"ended {-min(OVER_FIXED):.1f}% below to {max(OVER_FIXED):.1f}% above a fixed rate",
        f"differ by up to {max(more(max(each), min(each)) for each in LOSSES):.0f}% in these "
        "rounds.",
    ],
    "docs/performance.md": [
        f"in {IN_MEMORY} ms by shared memory, in {BY_TCP} ms over TCP",
        f"batch 32 | {steps_at('overlap', 'resnet18')} | |",
        f"| {steps('overlap', TINY).text()} | {steps_at('overlap_auto', TINY)} |",
        f"without a gradient | {steps('overlap', 'launch-bound-large').text()} | |",
        f"its gossip thread | {steps('overlap', CORE).text()} | {steps_at('overlap_auto', CORE)} |",
        f"tiny operations, 1 million parameters | | {steps_at('overlap_auto_limited', TINY)} |",
        f"and asks for them | | {steps_at('overlap_auto_limited', 'resnet18')} |",
        f"took {LOST:.0f}%, in the container {LOST_LIMITED[0]:.0f} and {LOST_LIMITED[1]:.0f}%",
        f"from a million parameters on) | {memory('gossipdp, a2cid2, compiled kernels')} |",
        f"| a2cid2, `GOSSIPDP_KERNELS=torch` | {memory('gossipdp, a2cid2')} |",
        f"| gossip, `GOSSIPDP_KERNELS=torch` | {memory('gossipdp, gossip')} |",
        f"| DDP | {memory('DDP (gloo)')} | | |",
        f"_bucket_view` | {memory('DDP (gloo), gradient_as_bucket_view')} | | |",
        f"A spare interpreter takes {SPARE}",
        f"| GPT of 36 million parameters, 2 workers | {on_card('gpt', 2, 'auto')}",
        f"| the same, asked for an exchange a step | {on_card('gpt', 2, '1.0')}",
        f"| the same, 4 workers | {on_card('gpt', 4, 'auto')}",
        f"| ResNet-18 (11 million), 2 workers | {on_card('resnet18', 2, 'auto')}",
        f"| ResNet-18, 4 workers | {on_card('resnet18', 4, 'auto')}",
        f"costs a worker {bounds(CARD_MS)} ms here",
        f"batch, ends {bounds(more(ours[3], plain[3]) for plain, ours in GPT)}% higher",
    ],
    "docs/lora.md": [
        f"the base alone has {result('adapters')['base_alone']:.3f}",
        f"| DDP | {lora('DDP, float32')} |",
        f"| DDP in bfloat16, batches by speed | {lora('DDP, bf16 hook, batches by speed')} |",
        f"| local SGD, steps by speed, H = 16 | {lora(SPEEDS)} |",
        f"| **gossipdp** (8 bits) | {lora(EIGHT)} |",
        f'| **gossipdp**, `wire_format="full"` | {lora(FLOATS)} |',
        f"| **the same, one killed** | {lora(KILLED)} |",
        f"again after {BACK_S} s",
        f"Local SGD had {1 - BY_SPEED[2] / 180:.0%} less time",
    ],
    "docs/choosing.md": [
        f"{bounds([LOST, *LOST_LIMITED])}%; in loops of tiny operations, with an idle core, "
        f"{LOST_TINY:.0f}% |",
        f"| GPU | 2% | 3% | {bounds(CARD_LOST)}% |",
        f"auto, in float32, ended [{-above(SHORT['gossipdp_auto'], SHORT['a2cid2']):.0f}% "
        f"below](quality.md#the-defaults) to {max(OVER_FIXED):.1f}% above `comm_rate=1`.",
        f"auto's loss was {bounds(ABOVE_ONCE, '.1f')}% higher there",
        f"{above(LARGE['gossipdp'], FIXED['gossip']):.0f}% higher for [a million",
        f"(measured: {AN_EXCHANGE} in place of 1.25)",
        f"half of the best rate cost {bounds(HALVED, '.1f')}%.",
        f"sent {IN_CODES[5] / 1e3:.1f} GB an hour",
    ],
    "docs/index.md": [
        f"About {AN_EXCHANGE} bytes a parameter and exchange",
        f"{LARGE['gossipdp'][BYTES] / LARGE['gossipdp']['comm_rate']:.0f} from a GPU",
        f"{GAP}% above DDP after 2,048 steps with an idle core; {ON_GPU}% in the worst run",
    ],
    "docs/faults.md": [
        f"others notice after {NOTICED['least']:.2f} to {NOTICED['greatest']:.2f} s",
        f"has the worker back after {STARTUP['back_s']['median']:.2f} s",
        f"with {SOAK['kills']} kills, {SOAK['joins']} joins and {SOAK['cuts']:,} cut links",
        f"the other three made {bounds(AS_THREE, '.2f')} of the exchanges",
        f"while a fourth joined {min(JOIN, JOIN_AUTO):.2f} or more",
        f"keep {min(IN_ALL):.1f} or more of their exchanges, single ones {min(SINGLE):.2f} or more",
    ],
    "docs/limits.md": [
        f"from [{CALM}% above](race.md#weight-decay) (300 s, decay 0.1) to",
        f"At most {len(MANY['workers'])} workers ran, on one machine, for "
        f"{MANY['figures']['steps of a worker, mean']:.0f} steps each",
        f"up to {int(LARGEST.split()[3]) / 1e6:.0f} million values",
    ],
    "docs/security.md": [
        f"each other {medians('exchange', 'a TCP link through TLS')[0]} GB/s, without it "
        f"{medians('exchange', 'a TCP link')[0]} (",
    ],
    "docs/shards.md": [
        f"gossip trains on {GOSSIP_SLOW[0]:.0f} samples/s, HSDP on {HSDP_SLOW[0]:.0f}; with equal "
        f"replicas both on {bounds([GOSSIP_EQUAL[0], HSDP_EQUAL[0]])}.",
    ],
    "docs/cli.md": [f"A [spare interpreter](concepts.md#words) ({SPARE})"],
}
UNMEASURED = (
    "2⁻⁸ (0.4%) of each value", "| CPU | 2% | 5% |", "25 to 28% more bytes", "[5% of a step]",
    "by up to 4% (runs that were not kept)",
    "ended 10% after its budget", "warm-up over 5%", "idle for 59% of the time",
)  # fmt: skip
"""Designs, theory, examples, what other tests run, and what has no results file."""
