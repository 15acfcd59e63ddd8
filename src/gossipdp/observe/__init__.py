"""What a run tells of itself while it trains.

run_log       JSON-lines log of a worker: writing, following, reading
"""
