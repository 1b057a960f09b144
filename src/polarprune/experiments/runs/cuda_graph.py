"""`CapturedStep`: run a function from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UP = 3  # eager runs before one is captured


class CapturedStep:
    """Runs a function; on a GPU, after a few eager runs, it replays a CUDA graph of it.

    Args:
        function: What to run; it must neither take nor return anything.
        on_gpu: Whether to capture it; otherwise every call runs the function.
    """

    def __init__(self, function: Callable[[], None], on_gpu: bool) -> None:
        self.function, self.on_gpu = function, on_gpu
        self.discard()

    def discard(self) -> None:
        """Drop the graph, because shapes have changed; a new one is captured later."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager_runs = 0

    def __call__(self) -> bool:
        """Run the function once and return whether it was replayed from a graph."""
        if not self.on_gpu:
            self.function()
            return False
        if self.eager_runs < _WARM_UP:
            self.eager_runs += 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.function()
            torch.cuda.current_stream().wait_stream(side)
            return False
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.function()
        self.graph.replay()
        return True
