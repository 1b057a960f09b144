"""Train-time structured pruning to a preset budget, with an exported model proved equal."""

from .analysis.trace import trace
from .errors import PruneError
from .files.model_file import load, save
from .gates.gate import Gate
from .surgery.apply import shrink
from .training.pruner import Pruner
from .training.schedule import Schedule

__all__ = ["Gate", "PruneError", "Pruner", "Schedule", "load", "save", "shrink", "trace"]
