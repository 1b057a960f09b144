"""A module's forward as a graph: captured, edited, stored, installed.

In: modules whose Python code does not adapt when channels are removed. Out: the same modules, whose
forward now runs an edited graph. It may replace the class of a module by a subclass; README.md has
a drawing of the data flow.
"""
