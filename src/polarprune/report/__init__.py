"""Reports on a pruning run: data, text, Markdown, JSON, an HTML page and charts.

In: plain data about a run. Out: `Report` and its views. `report` holds the data, `facts` turns it
into words and tables, `text`, `page` and `plots` lay these out. The package needs jinja2 and
matplotlib for the page and the charts only. It writes only the files that it is asked to write.
"""
