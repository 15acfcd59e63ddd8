"""The dynamics of A2CiD2: the (x, c) state, what exchange, flow and boundary do to it, the phase.

Arithmetic on tensors: no socket, file or clock. ``update`` has the equations, ``chunks`` the state
and its locks, ``device`` what a GPU needs.
"""
