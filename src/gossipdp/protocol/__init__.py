"""The protocol between workers, as pure state machines: no I/O, no thread, no wall clock.

    messages      the words of the wire, strictly typed and bounded; the machines ``say`` them
    actions       the requests of a state machine to its driver: what to ``do``
    members       who lives, is done, left or died; how much each has trained; how a worker joins
    step_clock    when to ask: even ticks in units of the worker's own gradient steps
    exchange_rate how many exchanges a step this worker can afford, for comm_rate="auto"
    neighbours    the graph over the live workers, and the order in which to ask neighbours
    pairing       one exchange at a time: who exchanges with whom, when, and with which moments
    confirmation  when a chunk that travels in a code may be applied
    peers         links, silence, who can exchange now, and the news that travels with messages
    liveness      who is dead: silence or a refused dial, and questions to others
    presence      who is there, for this worker: it follows members, peers and liveness
    reduction     one sum over a tree, and how its root judges who gives nothing to it
    averages      the average of all live workers while they train on, by such a sum
    consolidate   the end: the exact average, the same bits on every worker, by such a sum
    participants  who takes part in it: all who are done, but for those that hold it up
    worker        all of it composed: the one object that runtime and simulator drive

Time comes in as ``now`` in seconds from any monotonic clock, randomness as a ``random.Random``.
The simulator and the runtime drive the same code; only clock and links differ.
"""
