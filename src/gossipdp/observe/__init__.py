"""The views of a run while it trains.

log          the lines of a worker's log, and writing them
status       a worker's account of itself and of the others, as JSON and metrics, and asking for it
server       an HTTP server for both, and for the page of the job in a browser
board        the answers of several workers, put together to a job, for that and ``gossipdp top``
events       the same event as several workers noticed it; goodput: the share of possible samples
"""
