"""Thin adapters to training frameworks, one file each, to loggers and to collections of models.

In: a framework's trainer, its data and the settings of a pruner. Out: a training that meets the
budget, resumes from the framework's own checkpoints and exports the small model. An adapter counts
the steps, gives the gates a parameter group, and attaches the pruner; it decides nothing about
channels. It changes what the framework lets callbacks change, and imports the framework at its top,
so nothing else in polarprune imports an adapter. Only `factories`, which makes models of timm,
torchvision and the user's files by name, serves the experiments and the command line.
"""
