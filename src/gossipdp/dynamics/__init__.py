"""The dynamics of A2CiD2: the state of one worker, and the events that change it.

Arithmetic on tensors: no socket, file or clock.

chunks      the unit of the state, with its lock, and the rules for the two threads that share it;
            of parameters, of buffers, and of what optimizers keep, such as Adam's second moment
state       all chunks of one worker, and the boundary that passes over them
update      the equations; update_loops: they and the 8-bit code as loops that are compiled;
            machine_code: those loops, kept on disk
phase       how far a worker's momentum has flowed
lattice     the 8-bit codes, of the difference of two workers and of v: what they guarantee
device      the rules for parameters on a GPU
inboxes     there, what lets neither a step nor an exchange wait for the other
"""
