"""What a run tells of itself while it trains.

run_log       JSON-lines log of a worker: writing, following, reading
status            what a worker says of itself and of the others, as JSON; prometheus: as metrics
status_server     shows it over HTTP; status_client asks for it
status_board      what the answers of several workers come to: a job
"""
