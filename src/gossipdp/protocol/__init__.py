"""The protocol between workers, as pure state machines: no I/O, no thread, no wall clock.

    messages      what is said on the wire, strictly typed
    actions       what a state machine asks its driver to do
    pairing       one exchange at a time: who exchanges with whom, and when
    neighbours    which neighbour to ask: fresh, poisson, available, scheduled
    clock         when to ask: a Poisson clock in units of the worker's own gradient steps
    membership    who lives, who is done, who left, who died
    progress      samples and steps of every worker
    consolidate   the end: the exact average, the same bits on every worker
    worker        all of it composed: the one object that runtime and simulator drive

Time comes in as ``now`` in seconds from any monotonic clock, randomness as a ``random.Random``.
The simulator and the runtime drive the same code; only clock and links differ.
"""
