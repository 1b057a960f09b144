"""Cut a model to a plan, and prove that two models are equal.

In: a model, its `Graph` and a plan (which channels to keep). Out: a `Recipe` of plain data, the
smaller copy of the model that the recipe describes, and the largest difference between two
models. It works on copies; the user's model is not changed.
"""
