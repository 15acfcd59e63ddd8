"""The gossip thread: all that crosses the network for one worker.

thread     the thread, and the two queues through which others reach it
loop       its event loop: performs the protocol's actions, reports links to the protocol
exchange   one exchange: chunks out and in; codec: the forms in which they travel
sums       the data side of averages: reads, adds, divides, sends
transfer   whole states, to workers that start or join
joining    the question who is in the run, before one joins
processor  the processor time that training leaves idle
snapshot   what other threads may read; counters: the counts in it, as logs and pages show them
"""
