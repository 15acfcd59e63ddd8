"""What a run leaves behind and how it is shown; everything is drawn from the workers' logs.

run_log       JSON-lines log of a worker: writing, following, reading
live          progress in the terminal while the workers train
figures       loss, edge distance, who exchanged with whom, as a PNG
tensorboard   scalars per worker, where tensorboard is installed
"""
