"""Runs: training a baseline, pruning it, scoring the result; resumable.

In: settings, a `Task` and a folder. Out: networks, logs, checkpoints and the card of the run. It
writes only into the folder of the run and next to the baseline file that it is given.
"""
