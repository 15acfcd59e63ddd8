"""The part that a training script sees: ``GossipDataParallel`` and what it is made of.

module           the wrapper; options: its arguments; schedule: learning rates by the run's progress
worker           one worker as the main thread drives it: steps, copies, averages, the end
entry            its way into the run, at the start or by joining
hooks            the hooks in the user's optimizers and module; pace: a step waits for exchanges
views            the role of each parameter and buffer: trained, averaged, copied, left alone
flat_parameters  the module's values in flat tensors, and the watch over them
moments          what optimizers keep of parameters, and what of it travels
optimizer_watch  copies of the weights in an optimizer, which exchanges would not move
training_state   the optimizers' state, saved, given and taken, and who gives one; packing: its form
checkpoint       what a checkpoint holds, and where a run goes on; checkpoint_files: the files;
                 checkpointer: when one is taken; termination: SIGTERM and Ctrl+C
counted_batches  batches, epochs and their count; data_position: the way back to a place in the data
shards           replicas of several processes (fully_shard)
monitoring       the log and the status port; stats: what ``stats()`` and ``consolidate()`` return,
                 and warnings at the end
"""
