"""Define the gate, install gates in a model, and multiply them into its weights.

In: a model and its `Graph`. Out: the model with a gate before every layer that merges prunable
channels, or a copy with the gates multiplied into its weights. It parametrizes weights of the
user's model in place, and restores the model if that fails.
"""
