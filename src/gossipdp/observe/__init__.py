"""What a run tells of itself while it trains.

run_log_records   the lines of a worker's log
run_log_writer    writing it
run_log           reading it, whole or while it is written
status            what a worker says of itself and of the others, as JSON; prometheus: as metrics
status_server     shows it over HTTP; status_client asks for it
status_board      what the answers of several workers come to: a job; speeds: how fast counts grow
"""
