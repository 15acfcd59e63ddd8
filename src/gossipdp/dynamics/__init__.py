"""The dynamics of A2CiD2: the (x, c) state, its transitions, and the phase that drives the flow.

Pure arithmetic on tensors: no thread, socket, file or clock. Read ``reference`` for the equations,
``state`` for the buffers, ``kernels`` for what runs.
"""
