"""gossipdp inside other frameworks: each worker is a training of its own to the framework.

    single_process    hides the launcher from the framework while it is set up
    transformers      GossipCallback for the Trainer of Hugging Face transformers
    accelerate        gossip_data_parallel for a loop under an Accelerator
    lightning         GossipStrategy for the Trainer of Lightning

Importing this package imports none of them; each module needs its own (``pip install
'gossipdp[transformers]'`` or ``'gossipdp[lightning]'``).
"""

from gossipdp.integrations.single_process import Worker, single_process

__all__ = ["Worker", "single_process"]
