"""Check everything that users pass in, before anything is changed.

In: arguments, models, plans and pruner states as the user gave them. Out: the same values in a
checked, plain form, or one `PruneError` that says where, what, and the remedy. It may touch
nothing: no check changes a model or an optimizer.
"""
