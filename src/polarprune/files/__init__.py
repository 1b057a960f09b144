"""Save and load small models; export them to ONNX and torch.export.

In: a small model and a path, or a file that anyone may have written. Out: a file, or a model built
from one. `untrusted` checks everything that is read before it is used, and nothing in a file is
run. The package writes only the files that it is asked to write.
"""
