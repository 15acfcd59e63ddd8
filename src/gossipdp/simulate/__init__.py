"""Simulation: the same protocol and dynamics as on real workers, on a virtual clock.

What a run is:

    scenario          everything that a run depends on
    compute_time      how long gradient steps take
    link_model        what links are like
    objective         the seam of what is minimised:  consensus, quadratic, module_objective
    optimizers        how rows step

How it runs:

    simulation        simulate(scenario, method) -> Trace
    ideal             Poisson edges, instantaneous exchanges: the paper's model      edges
    links             the real protocol over links                                   network
    synchronous       rounds: all-reduce, D-PSGD
    engine            the event heap and its clock
    population        x and c of all workers, a row each
    training          their gradient steps
    recorder, trace   the time series
    batch             many runs over processes
"""
