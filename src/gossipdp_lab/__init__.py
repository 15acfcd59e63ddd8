"""The laboratory of gossipdp: everything that a training process does not import.

Its packages come with ``pip install 'gossipdp[lab]'``; its commands appear as ``gossipdp demo``,
``train``, ``simulate`` and ``report`` by the entry points of pyproject.toml. Each package imports
only those to its left, and the library, which never imports the lab (a test says so):

    baselines  →  tasks  →  simulate  →  report  →  demo

baselines   DistributedDataParallel under the wrapper's names, with which demo and train compare
tasks       built-in trainings: digits, bytes, CIFAR-10, ImageNet, and ``gossipdp train``
simulate    the same protocol on a virtual clock, and ``gossipdp simulate``
report      pages from a run's logs, pictures of simulations, and ``gossipdp report``
demo        several workers on this machine, with faults, and ``gossipdp demo``

console     what their commands show: lines, tables, the progress of long work
"""
