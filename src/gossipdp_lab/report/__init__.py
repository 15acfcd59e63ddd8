"""The page of a run, drawn from the workers' logs.

run_log       the logs as they were written
view          the logs on one clock
page          a run as one page that opens offline: gossipdp report. charts: its drawings;
              page.html, charts.html: jinja templates; page.css, page.js
"""
