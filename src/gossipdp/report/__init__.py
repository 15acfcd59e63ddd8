"""What a run leaves behind and how it is shown; everything is drawn from the workers' logs.

live          progress in the terminal while the workers train
figures       loss, edge distance, who exchanged with whom, as a PNG
tensorboard   scalars per worker, where tensorboard is installed
"""
