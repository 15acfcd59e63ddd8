"""Starting workers, and how each learns who it is and where the others are.

environment  the variables that a launcher, Slurm or Kubernetes sets
store        the TCPStore where workers meet; rendezvous: how they do
networks     which network a worker is in, and how it asks to join one
team         what one supervisor tells its workers, and what they report
supervisor   watches the workers of this machine, and starts them again
replica      workers of several processes, one for each shard of the model
local        the workers themselves: ``launch()`` for functions, and scripts
"""
