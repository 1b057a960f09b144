"""The one exception that is raised on purpose."""


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
