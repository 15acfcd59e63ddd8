"""The protocol between workers, as pure state machines: no I/O, no thread, no wall clock.

    messages      what is said on the wire, strictly typed
    actions       what a state machine asks its driver to do
    pairing       one exchange at a time: who exchanges with whom, and when
    neighbours    which neighbour to ask: fresh, poisson, available, scheduled
    clock         when to ask: a Poisson clock in units of the worker's own gradient steps
    membership    who lives, who is done, who left, who died
    progress      samples and steps of every worker
    links         silence, heartbeats, and the news that travels with messages
    failure_detector   who is dead: silence, and questions to others
    neighbourhood      the graph over the live workers, as they die, leave and join
    refresher     taking over another's parameters after a stall of one's own
    rivalry       two processes of one rank
    join          how a worker comes into a run that is under way
    consolidate   the end: the exact average, the same bits on every worker
    worker        all of it composed: the one object that runtime and simulator drive

Time comes in as ``now`` in seconds from any monotonic clock, randomness as a ``random.Random``.
The simulator and the runtime drive the same code; only clock and links differ.
"""
