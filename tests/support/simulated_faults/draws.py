"""Random schedules of faults, by seed."""

from itertools import pairwise
from random import Random

from gossipdp.protocol.worker import Method
from simulated_faults import schedule

SIZES = (
    *(8, 8, 8, 8, 8, 8, 8, 9, 9, 9, 10, 10, 10, 11, 12, 12, 12, 12, 13, 14, 15),
    *(16, 16, 16, 16, 16, 17, 20, 20, 24, 24, 24, 28, 32, 48, 64),
)
"""Mostly small: one schedule of 64 costs as much as dozens of 8."""
LARGEST_FREQUENT = 32
"""Half of the draws of a larger size are drawn again: one schedule of 64 takes 15 to 60 seconds."""
GRAPHS = ("ring", "ring", "path", "star", "torus", "exponential")
LARGEST_DENSE = 24
"""A complete graph of 64 sends 40,000 heartbeats a second: more of the same, at a high price."""
METHODS: tuple[Method, ...] = ("a2cid2", "a2cid2", "gossip")
POLICIES = ("fresh", "fresh", "fresh", "fresh", "available", "poisson")


def draw_schedule(seed: int, *, largest: int = 64) -> schedule.FaultSchedule:
    """Draw the schedule of a seed, with at most ``largest`` workers at first.

    Not drawn, since no invariant could hold:

    - A partition, or a stall longer than the time-out, during consolidation. Two groups that each
      declare the other dead and meet again only after one of them has left have two results
      (:mod:`gossipdp.protocol.consolidate`, "Where it ends"); the result says how many workers it
      averages. Stalls and partitions during training last into the quiet time at most.
    - Restarts and joins during consolidation: who comes when the others leave may find nobody, and
      consolidates alone. Ranks are started again up to the end of ``faulty_s``.
    - Partitions that overlap: the simulated network knows one at a time, and what an older one
      holds up would arrive behind what was sent after it, as on no link.
    - The crash of all. At least two of the first workers are never crashed during training.
    """
    random = Random(f"{seed} schedule")
    sizes = [size for size in SIZES if size <= largest]
    num_workers = random.choice(sizes)
    if num_workers > LARGEST_FREQUENT and random.random() < 0.5:
        num_workers = random.choice(sizes)
    dense = ["complete"] if num_workers <= LARGEST_DENSE else []
    graph = random.choice([*GRAPHS, *dense])
    timeout_s, faulty_s = 1.0, random.uniform(3.0, 8.0)
    transfer_s = random.choice([0.005, 0.03, 0.1])
    num_faults = 2 + int(random.expovariate(1 / (1 + num_workers / 4)))
    num_begins = num_workers * faulty_s / 0.25
    exchanges = sorted(random.sample(range(int(num_begins)), k=random.randint(0, 6)))
    return schedule.FaultSchedule(
        seed=seed,
        graph=graph,
        num_workers=num_workers,
        # A run that sets its own rate has several times the events.
        comm_rate=random.choice([0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 2.0, "auto"]),
        method=random.choice(METHODS),
        policy=random.choice(POLICIES),
        timeout_s=timeout_s,
        step_s=random.choice([0.15, 0.25]),
        latency_s=random.choice([0.0, 0.0005, 0.005, 0.03]),
        latency_jitter_s=random.choice([0.0, 0.002, 0.03]),
        transfer_s=transfer_s,
        faulty_s=faulty_s,
        faults=_draw_faults(random, num_workers, faulty_s, timeout_s, num_faults),
        lost_at_messages=tuple(
            sorted(random.sample(range(int(4 * num_begins)), k=random.randint(0, 8)))
        ),
        broken_exchanges=tuple(
            schedule.BrokenExchange(begin, random.uniform(0.0, 1.5) * transfer_s)
            for begin in exchanges
        ),
        ending=_draw_ending(random, num_workers),
        done_within_s=random.choice([0.0, 0.5, 2.0]),
    )


def _draw_faults(
    random: Random, num_workers: int, faulty_s: float, timeout_s: float, num_faults: int
) -> tuple[schedule.Fault, ...]:
    immortal = set(random.sample(range(num_workers), 2))
    mortal = [rank for rank in range(num_workers) if rank not in immortal]
    faults: list[schedule.Fault] = []
    for _ in range(num_faults):
        at_s = random.uniform(0.2, faulty_s)
        kind = random.choice(["crash", "crash", "join", "stall", "stall", "partition", "cut"])
        if kind == "crash":
            rank = random.choice(mortal)
            faults.append(schedule.Crash(at_s, rank))
            again_s = at_s + random.choice([0.0, 0.05, 0.5, 2.0]) * timeout_s * random.random()
            if random.random() < 0.6 and again_s < faulty_s:
                faults.append(schedule.Restart(again_s, rank, random.randrange(num_workers)))
        elif kind == "join":
            faults.append(schedule.Join(at_s, random.randrange(num_workers)))
        elif kind == "stall":
            # Just short of the time-out, just beyond it, for long; sometimes all at once.
            duration_s = timeout_s * random.choice([0.3, 0.9, 1.1, 3.0]) * random.uniform(0.9, 1.1)
            is_total = random.random() < 0.1
            ranks = range(num_workers) if is_total else [random.randrange(num_workers)]
            faults += [schedule.Stall(at_s, rank, duration_s) for rank in ranks]
        elif kind == "partition":
            faults.append(_draw_partition(random, num_workers, at_s, timeout_s))
        else:
            first, second = random.sample(range(num_workers), 2)
            faults.append(schedule.Cut(at_s, first, second))
    found, heals_at_s = list[schedule.Fault](), 0.0
    for fault in sorted(faults, key=lambda fault: fault.at_s):
        if isinstance(fault, schedule.Partition):
            if fault.at_s <= heals_at_s:  # they must not overlap
                continue
            heals_at_s = fault.at_s + fault.duration_s
        found.append(fault)
    return tuple(found)


def _draw_partition(
    random: Random, num_workers: int, at_s: float, timeout_s: float
) -> schedule.Partition:
    duration_s = timeout_s * random.choice([0.5, 1.5, 5.0]) * random.uniform(0.8, 1.2)
    ranks = list(range(num_workers))
    if random.random() < 0.5:
        random.shuffle(ranks)
    marks = random.sample(range(1, num_workers), random.choice([1, 1, 2]))
    bounds = [0, *sorted(marks), num_workers]
    groups = [tuple(sorted(ranks[begin:end])) for begin, end in pairwise(bounds)]
    return schedule.Partition(at_s, duration_s, tuple(groups))


def _draw_ending(random: Random, num_workers: int) -> tuple[schedule.EndingFault, ...]:
    """About 15 frames a worker are sent without faults."""
    num_cuts = random.choice([0, 0, 1, 3, 6])
    num_crashes = min(random.choice([0, 0, 1, 2, 3]), num_workers - 1)
    frames = random.sample(range(15 * num_workers), num_cuts + num_crashes)
    cuts = [schedule.EndingFault(frame, "cut") for frame in frames[:num_cuts]]
    crashes = [
        schedule.EndingFault(frame, random.choice(["sender crashes", "receiver crashes"]))
        for frame in frames[num_cuts:]
    ]
    return tuple(sorted([*cuts, *crashes], key=lambda ending: ending.frame))
