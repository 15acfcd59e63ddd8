"""The gossip thread: codec, exchange, state transfer, averaging, loop."""
