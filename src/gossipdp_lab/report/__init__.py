"""The page of a run, drawn from the workers' logs.

run_log       the logs as they were written
view          the logs on one clock
command       gossipdp report: a run as one page that opens offline. charts: its drawings;
              page.html, charts.html: jinja templates; page.css, page.js
"""
