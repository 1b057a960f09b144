"""The one exception this library raises on purpose."""


class PruneError(Exception):
    """Says where, what, and the remedy. Nothing is lost or half changed when it is raised."""
