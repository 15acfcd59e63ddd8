"""Starting workers, and how each learns its rank and the addresses of the others.

The worker's side:
environment  the variables that tell a worker who it is
rendezvous   the meeting of all workers at the start; store: the TCPStore where they meet
reports      what a worker reports to the launcher that started it
cores        the cores that it may use, and its share of them

The launcher's side:
launch_plan  the workers of one supervisor, and the run they belong to or join
processes    a worker of this machine over all its lives: a process, or a replica of several
supervisor   watches these workers, and starts them again
faults       kills, stops and slows them by a plan, to test a script
local        the processes themselves: ``launch()`` for functions, and scripts, with spare
             interpreters that have imported torch (spare_interpreter) for the next restart
own_group    the fork server's own process group
"""
