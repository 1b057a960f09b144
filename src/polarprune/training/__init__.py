"""The pruning run: close gates while the user trains, compact the model, export the small one.

In: a model, a budget and an optimizer. Out: `Pruner`, and from it the small model and a report. It
changes the user's model (gates, compaction) and the optimizer's state.
"""
