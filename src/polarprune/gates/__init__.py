"""The gate, where it goes, and how it folds away.

In: a model and its `Graph`. Out: the model with a gate before every layer that merges prunable
channels, or a copy with the gates multiplied into its weights. It parametrizes weights of the
user's model, in place, and undoes that if it fails.
"""
