"""Run the model once and record what it did.

In: a model and example inputs. Out: a `Tape` with every ATen operation, its shapes, its module
and its source line. It runs the model, and restores weights, buffers, modes and random states
afterwards.
"""
