"""Networks by name: those of the paper and smaller ones.

In: a name of `NETWORKS`. Out: a new `nn.Module`, as torch or torchvision initialises it. It
downloads weights only where a preset asks for pretrained ones.
"""
