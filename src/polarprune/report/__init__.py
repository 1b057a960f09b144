"""What happened, as data, text, page and picture.

In: plain data about a run. Out: `Report` with views of it as text, Markdown, JSON, HTML and
plots. It writes only the files that it is asked for.
"""
