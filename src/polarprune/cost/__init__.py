"""Compute what a set of widths costs, and find widths that meet a budget.

In: a `Graph`, and models to be timed. Out: exact MACs, parameters and memory for any widths; a
latency model fitted to measured times; the channels that have to close to meet a budget. It times
models and changes none.
"""
