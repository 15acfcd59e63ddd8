"""Simulation: the same protocol code as on real workers, on a virtual clock.

engine    the event heap and its clock
network   workers, their links and exchanges as events: latency, transfers, lost links
"""
