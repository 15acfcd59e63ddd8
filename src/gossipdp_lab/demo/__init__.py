"""``gossipdp demo``: several workers on this machine, with faults if you ask for them."""
