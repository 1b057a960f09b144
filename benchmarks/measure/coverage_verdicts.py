"""Says which of the models that model_coverage.py measured pass, and which get small enough."""

from typing import Any


def passed(row: dict[str, Any]) -> bool:
    """Return whether a model was cut to an equal one with the claimed MACs, and the control saw it.

    A model that was also measured with `norms=True` has to pass in both ways.
    """
    if "error" in row or not row["macs_exact"] or ("stream" in row and not passed(row["stream"])):
        return False
    return bool(row["difference"] <= 1e-10 and (row["control"] > 1e-7 or row["open"] == 0))


def small_enough(row: dict[str, Any]) -> bool:
    """Return whether half of the channels cost as little as expected for this kind of model."""
    if row["kind"] != "transformer":
        return bool(min(row["macs"], row.get("stream", row)["macs"]) <= 0.35)
    return bool(row["macs"] <= 0.55 and row.get("stream", row)["macs"] <= 0.35)
