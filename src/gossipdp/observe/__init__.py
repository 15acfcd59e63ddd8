"""What a run tells of itself while it trains.

log          the lines of a worker's log, and reading them, whole or while they are written
log_writer   writing them
status       what a worker says of itself and of the others, as JSON; prometheus: as metrics
server       shows it over HTTP; client asks for it
board        what the answers of several workers come to: a job, for ``gossipdp top``
"""
