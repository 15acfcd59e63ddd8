"""What runs in a worker besides the training loop.

    link (the seam) ← tcp (sockets) ← frames, handshake, identity, fork
      ↑
    gossip_thread → exchange, transfer      the thread that owns all sockets
    rendezvous, launcher, preload           how workers start and find one another

Protocol decisions are made in :mod:`gossipdp.protocol`; here is what they need of the world:
sockets, threads, processes and a clock.
"""
