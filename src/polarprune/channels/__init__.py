"""Find which channels must be removed together, and which cannot be removed.

In: tapes. Out: a `Graph` of groups of channels: where each group occurs, which groups are
prunable, and why the others are frozen. It reads tapes only; it never runs or changes a model.
README.md has a drawing of the data flow and a worked example.
"""
