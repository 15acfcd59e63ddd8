"""The part that a training script sees: ``GossipDataParallel`` and the helpers around it."""
