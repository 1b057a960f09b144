"""Save and load small models; export them to ONNX and torch.export.

In: a small model and a path, or a file that anyone may have written. Out: a safetensors file, or
a model built from one. Everything read from a file is checked in `untrusted` before it is used;
nothing in a file is ever run.
"""
