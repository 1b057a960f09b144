"""Train-time structured pruning to a preset budget, with an exported model proved equal."""

from .checkpoint import load, save
from .errors import PruneError
from .gates import Gate
from .pruner import Pruner
from .schedule import Schedule
from .surgery import shrink
from .trace import trace

__all__ = ["Gate", "PruneError", "Pruner", "Schedule", "load", "save", "shrink", "trace"]
