"""Starting workers, and how each learns its rank and the addresses of the others.

environment  the variables that tell a worker who it is; schedulers: those of Slurm and Kubernetes
store        the TCPStore where workers meet; rendezvous: how they do
joining      how a worker asks to join a run that goes on
reports      what a worker reports to the launcher that started it
launch_plan  the workers of one supervisor, and the run they belong to
supervisor   watches the workers of this machine, and starts them again
replica      workers of several processes, one for each shard of the model
local        the workers themselves: ``launch()`` for functions, and scripts
"""
