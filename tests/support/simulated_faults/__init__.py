"""Runs of the simulated network under faults, with every invariant checked at every event.

schedule          what goes wrong, and when              draws: random schedules, by seed
run               one run under a schedule               averaged_rows: what its end averages
invariants        what must hold at every event          ledger: the account of x + c/2
"""
