"""The pruning run: gates that close while the user trains.

In: a model, a budget and an optimizer. Out: `Pruner`, which closes gates step by step, compacts
the model and exports the small one. It changes the user's model (gates, compaction) and the
optimizer's state.
"""
