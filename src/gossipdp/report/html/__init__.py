"""A run as one HTML page that opens offline: everything inline, drawn as SVG from the logs.

run_view      what the logs say, on one clock: totals, lines, faults
spans         shares of a worker's time
svg           scales, ticks and numbers of the drawings
line_chart    values over time or samples, a line a worker
timeline      what every worker did when
heat_map      one value for every pair of workers
prediction    the plan beside what happened
chart_sections, table_sections  what the page says under each heading
page          all of it, with page.css and page.js
"""
