"""Structured pruning to a preset budget while a model trains.

The exported model computes the same function as the trained one, up to floating-point rounding;
every export compares the two.

A package or module of this folder imports only those before it in this list: errors,
plain_data, torch_internals, validation, tracing, channels, rules, rewriting, surgery, cost, gates,
analysis, report, training, files, integrations, experiments, cli.
"""

from .analysis.trace import trace
from .errors import PruneError
from .files.model_file import load, save
from .gates.gate import Gate
from .surgery.apply import shrink
from .training.pruner import Pruner
from .training.schedule import Schedule

__all__ = ["Gate", "PruneError", "Pruner", "Schedule", "load", "save", "shrink", "trace"]
