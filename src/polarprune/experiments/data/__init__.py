"""Data sets: what a network learns from and is scored on.

In: folders with CIFAR-10, ImageNet, Pascal VOC or style photos, or a text. Out: a `Task`, which
makes batches, computes losses and scores predictions. It reads files and trains nothing.
"""
