"""The paper's figures and claims, measured by the simulator and written to one page.

page        docs/reproduction.md from stored results; the registry of sections
section     the seam: measure -> result, result -> figure and text
stored      a result with what it was measured by, as JSON
jobs        many jobs over processes, with a progress bar
fits        exponents by least squares; means with their spread
markdown, drawing    tables; the look of all figures

The sections, each with a file for its text and figure beside it:

mixing      communications per e-fold of the consensus distance, and their exponents
training    loss and consensus distance on rings of 4 to 64
time        training time against the number of workers
pairing     decay against exchange duration for every neighbour policy
invariant   the mean of x + c/2, under our exchange and the released one

Source of the figures reproduced: Nabli, Belilovsky, Oyallon, 2023, arXiv 2306.08289.
"""
