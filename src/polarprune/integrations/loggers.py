"""Send the history of a pruner to a logger: TensorBoard, `log(dict)`, or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import PruneError
from ..training.pruner import Pruner
from ..training.steering import Row


def watch(pruner: Pruner, logger: object, *, prefix: str = "pruning") -> None:
    """Send every new row of `pruner.history` to a logger.

    TensorBoard's writers get scalars and a histogram of the gates. Objects or modules with
    `log(dict)` (Weights & Biases, trackio, a `Trainer` of Hugging Face) and functions get a dict of
    numbers that includes the step. Lightning's loggers and MLflow get a call of `log_metrics`.

    Args:
        pruner: The pruner to watch.
        logger: A `SummaryWriter`, an object or module with `log(dict)` or
            `log_metrics(dict, step=...)`, or a function that takes a dict.
        prefix: Put before every name, as in `pruning/macs`.

    Raises:
        PruneError: If the logger is none of these.

    Example:
        >>> from polarprune.integrations.loggers import watch
        >>> rows = []
        >>> watch(pruner, rows.append)
        >>> optimizer.step()
        >>> sorted(rows[0])[:3]
        ['pruning/between', 'pruning/closed', 'pruning/eps']
    """
    pruner.watchers.append(_receiver(logger, prefix))


def _receiver(logger: object, prefix: str) -> Callable[[Row], None]:
    if hasattr(logger, "add_scalar") and hasattr(logger, "add_histogram_raw"):
        return lambda row: _write(logger, _numbers(row, prefix), row, prefix)
    log = getattr(logger, "log", None)
    if log is None and hasattr(logger, "log_metrics"):
        return lambda row: _log_metrics(logger, row, prefix)
    log = logger if log is None else log
    if not callable(log) or not _takes_a_dict(log):
        raise PruneError(
            f"watch: {type(logger).__name__} has no log(dict). Give a SummaryWriter, an object or "
            f"module with log(dict), or a function, such as watch(pruner, lambda row: print(row))."
        )
    return lambda row: log({**_numbers(row, prefix), f"{prefix}/step": row["step"]})


def _takes_a_dict(log: Callable[..., object]) -> bool:
    try:
        inspect.signature(log).bind({})
    except TypeError:
        return False
    except ValueError:  # builtins without a signature, such as list.append of old Pythons
        return True
    return True


def _numbers(row: Row, prefix: str) -> dict[str, float]:
    """Return the numbers of a row, each under its name in the log."""
    return {
        f"{prefix}/{key}": value for key, value in row.items() if key not in ("step", "histogram")
    }


def _log_metrics(logger: Any, row: Row, prefix: str) -> None:
    """Log with a logger of Lightning; that of TensorBoard has a writer for histograms."""
    logger.log_metrics(_numbers(row, prefix), step=row["step"])
    writer = getattr(logger, "experiment", None)
    if hasattr(writer, "add_histogram_raw"):
        _write(writer, {}, row, prefix)


def _write(writer: Any, numbers: dict[str, float], row: Row, prefix: str) -> None:
    """Write scalars and the histogram of the gates to TensorBoard."""
    for name, value in numbers.items():
        writer.add_scalar(name, value, row["step"])
    counts = row["histogram"]
    limits = [(index + 1) / len(counts) for index in range(len(counts))]
    middles = [limit - 0.5 / len(counts) for limit in limits]
    sums = [sum(c * m**power for c, m in zip(counts, middles, strict=True)) for power in (1, 2)]
    writer.add_histogram_raw(
        f"{prefix}/gates",
        min=0.0,
        max=1.0,
        num=sum(counts),
        sum=sums[0],
        sum_squares=sums[1],
        bucket_limits=limits,
        bucket_counts=counts,
        global_step=row["step"],
    )
