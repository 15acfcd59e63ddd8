"""Who am I, rendezvous, supervisor, ``launch()``."""
