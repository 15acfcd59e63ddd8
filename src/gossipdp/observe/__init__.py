"""What a run tells of itself while it trains.

log          the lines of a worker's log: writing them, and reading them, whole or meanwhile
status       what a worker says of itself and of the others, as JSON, and asking for it
prometheus   the same as metrics
server       shows both over HTTP
board        what the answers of several workers come to: a job, for ``gossipdp top``
"""
