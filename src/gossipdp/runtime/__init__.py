"""What runs in a worker besides the training loop.

    link, transport     the seam: links, and what makes them
    tcp                 sockets, from frames, handshake, identity, crossing, tcp_link, fork
    gossip_thread       owns a gossip_loop, which drives exchange, transfer and averaging over links
    wire_formats        how parameters travel in an exchange: plain_exchange, lattice_exchange
    rendezvous          how workers find one another; launcher and supervisor start them

Protocol decisions are made in :mod:`gossipdp.protocol`; here is what they need of the world:
sockets, threads, processes and a clock.
"""
