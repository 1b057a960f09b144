"""The one exception that is raised on purpose, and the reasons that other exceptions give."""


class PruneError(Exception):
    """Raised for everything that a user can correct; nothing was changed when it is raised.

    The message says where the problem is, what it is, and what to do.

    Example:
        >>> import torch
        >>> import polarprune as pp
        >>> try:
        ...     pp.Pruner(torch.nn.Linear(8, 4), torch.randn(1, 8), macs=2, steps=10)
        ... except pp.PruneError as error:
        ...     print(error)
        macs=2: a budget is a fraction of the original, between 0 and 1
        (macs=0.5 is half of the MACs).
    """


def reason_given(error: BaseException) -> str:
    """Return in one short line why something failed, without a full stop at the end.

    A `PruneError` explains itself; the message of any other exception follows its type.
    """
    lines = str(error).strip().splitlines() or [""]
    line = lines[0].strip().rstrip(".")[:_MOST_CHARACTERS]
    if isinstance(error, PruneError):
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


_MOST_CHARACTERS = 300
