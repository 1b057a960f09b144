"""Pruning runs of two processes, for `tests/unit/training/test_distributed.py`.

`python -m tests.helpers.distributed_runs FOLDER` runs them all in one pair of processes, because
importing torch takes longer than any of them. Every process writes what each run returned, or its
error. In the last run one process kills itself; another pair resumes it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers do so late; here it is done once for both
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

import polarprune as pp
from tests.helpers.processes import fork_two

STEPS, HALF = 24, 12
Result = dict[str, Any]
Parts = tuple[nn.Module, pp.Pruner, torch.optim.Optimizer]


class Net(nn.Module):
    """A stem, a residual block and a head: several layers read the gates of the stem."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(8, 10, 3, padding=1), nn.ReLU())
        self.outer = nn.Conv2d(10, 8, 3, padding=1)
        self.last = nn.Sequential(nn.Conv2d(8, 7, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.outer(self.inner(x)))
        return self.head(self.last(x).mean((2, 3)))


class StandardizedConv(nn.Conv2d):
    """A layer that computes its weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, padding=1)


class ComputedWeights(nn.Module):
    """Weights that a parametrization or a forward computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = StandardizedConv(3, 8, 3), StandardizedConv(8, 8, 3)
        self.last, self.head = spectral_norm(nn.Linear(8, 12)), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.inner(F.relu(self.first(x)))).mean((2, 3))
        return self.head(F.relu(self.last(x)))


class Feed(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Repeated(nn.Module):
    """Three equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(Feed(), Feed(), Feed()), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(F.unfold(x, 2, stride=2).mT).mean(1))


class TiedTransformer(nn.Module):
    """A network with patches as tokens, gates in norms, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16, bias=False)
        self.inner = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.last, self.head = nn.LayerNorm(16), nn.Linear(16, 4)
        self.again = nn.Linear(12, 16, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.unfold(x, 2, stride=2).mT
        return self.head(self.last(self.inner(self.first(x)) + self.again(x)).mean(1))


def make(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(0)
    return Net(norm)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the data of one process: other data in every step and in every process."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    pictures = torch.randn(8, 3, 8, 8, generator=generator)
    return pictures, torch.randint(0, 4, (8,), generator=generator)


def prune(model: nn.Module, **more: Any) -> pp.Pruner:
    """Build a pruner; the values of the example differ between the processes."""
    example = batch(0, 7 + dist.get_rank())[0][:2]
    return pp.Pruner(model, example, **{"macs": 0.5, "steps": STEPS, **more})


def optimizer_of(pruner: pp.Pruner, rate: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(pruner.param_groups(lr=rate), momentum=0.9)
    pruner.attach(optimizer)
    return optimizer


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, last: int = STEPS
) -> None:
    for step in range(first, last):
        pictures, labels = batch(step, dist.get_rank())
        optimizer.zero_grad()
        F.cross_entropy(model(pictures), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def share_buffers(model: nn.Module) -> None:
    """Give all processes the first one's norm statistics: a checkpoint may store any of them."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def results(pruner: pp.Pruner) -> Result:
    """Return what the tests compare."""
    small = pruner.export()
    return {
        "state": pruner.state_dict(),
        "plan": pruner.plan(),
        "history": pruner.history,
        "weights": [parameter.detach() for parameter in small.parameters()],
        "outputs": small.eval()(batch(99, 0)[0]).detach(),
        "compactions": pruner.compactions,
        "class": type(small).__name__,
        "macs": pruner.cost()["macs"] / pruner.graph.cost.original()["macs"],
    }


def raised(run: Callable[[], object]) -> str:
    """Return the text of the PruneError that a run raises."""
    try:
        run()
    except pp.PruneError as error:
        return str(error)
    return "nothing was raised"


# --- DistributedDataParallel ----------------------------------------------------------------------


def ddp(compact: str | None = None, hook: Any = None, **options: Any) -> Result:
    model = make()
    pruner = prune(model, compact=compact)
    wrapped = DistributedDataParallel(model, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    train(wrapped, optimizer_of(pruner))
    return results(pruner)


def ddp_without_norms() -> Result:
    model = make(nn.Identity)  # identical to one process with all data
    pruner = prune(model)
    train(DistributedDataParallel(model), optimizer_of(pruner))
    return results(pruner)


def one_process() -> Result:
    model = make(nn.Identity)
    pruner = prune(model)
    optimizer = optimizer_of(pruner)
    for step in range(STEPS):
        both = [batch(step, rank) for rank in range(dist.get_world_size())]
        pictures, labels = (torch.cat(parts) for parts in zip(*both, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(pictures), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return results(pruner)


def ddp_compacted_by_hand() -> Result:
    model = make()
    pruner = prune(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = optimizer_of(pruner)
    train(wrapped, optimizer, 0, HALF + 1)
    pruner.compact()
    train(wrapped, optimizer, HALF + 1)
    return results(pruner)


def ddp_with_strange_hook() -> Result:
    """Automatic compaction gives up; by hand it works without the wrapper."""
    model = make()
    pruner = prune(model, compact="auto")
    wrapped = DistributedDataParallel(model)

    def hook(state, bucket):  # DDP reads the annotations, and knows none that are strings
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0] / dist.get_world_size())

    wrapped.register_comm_hook(None, hook)
    optimizer = optimizer_of(pruner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(wrapped, optimizer, 0, HALF + 1)
    error = raised(pruner.compact)
    del wrapped
    pruner.compact()
    train(DistributedDataParallel(model), optimizer, HALF + 1)
    messages = [str(one.message) for one in caught]
    return {**results(pruner), "warnings": messages, "error": error}


def ddp_refused_in_one_process() -> Result:
    model = make()
    pruner = prune(model, compact="auto")

    def refuse(*given: object) -> None:
        raise pp.PruneError("the proof failed here")

    if dist.get_rank() == 1:
        pruner._run.compaction._prove = refuse
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(DistributedDataParallel(model), optimizer_of(pruner))
    return {**results(pruner), "warnings": [str(one.message) for one in caught]}


def ddp_with_other_budgets() -> Result:
    model = make()
    pruner = prune(model, macs=0.5 if dist.get_rank() else 0.6)
    optimizer = optimizer_of(pruner)
    return {"error": raised(lambda: train(DistributedDataParallel(model), optimizer))}


def ddp_state_entry() -> Result:
    """Resume from `state_dict()` of the wrapper, which has the prefix `module.`."""
    model = make()
    pruner = prune(model)
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(pruner)
    train(wrapped, optimizer, 0, HALF)
    states = wrapped.state_dict(), optimizer.state_dict()
    model = make()
    pruner = prune(model)
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(pruner)
    wrapped.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    train(wrapped, optimizer, HALF)
    return results(pruner)


def ddp_checkpoint(folder: Path) -> Result:
    """Resume from a checkpoint of `torch.distributed.checkpoint`, of the model in the wrapper."""
    model = make()
    pruner = prune(model)
    optimizer = optimizer_of(pruner)
    train(DistributedDataParallel(model), optimizer, 0, HALF)
    share_buffers(model)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "ddp")
    model = make()
    pruner = prune(model)
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(pruner)
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "ddp")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(wrapped, optimizer, HALF)
    return results(pruner)


class _OnlyTheClass(FullyShardedDataParallel):
    """FSDP1 cannot be built without an accelerator."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = nn.Linear(2, 2)


def wrapped_models() -> Result:
    wrapped = DistributedDataParallel(make())
    return {
        "ddp": raised(lambda: prune(wrapped)),
        "dp": raised(lambda: prune(nn.DataParallel(make()))),
        "fsdp1": raised(lambda: prune(_OnlyTheClass())),
    }


# --- fully_shard ----------------------------------------------------------------------------------


def shard_layers(model: nn.Module, **more: Any) -> None:
    """Shard layer by layer, then the whole."""
    for layer in (model.stem, model.inner, model.outer, model.last):
        fully_shard(layer, **more)
    fully_shard(model, **more)


def build(order: str, shard: Callable[[nn.Module], object] = shard_layers, **more: Any) -> Parts:
    """Build a sharded run; `order` tells when `fully_shard` is called."""
    model = make()
    if order == "shard first":
        shard(model)
    pruner = prune(model, **more)
    if order == "pruner first":
        shard(model)
    return model, pruner, optimizer_of(pruner)


def sharded(order: str, shard: Callable[[nn.Module], object] = shard_layers) -> Result:
    model, pruner, optimizer = build(order, shard)
    train(model, optimizer, 0, HALF)
    with torch.no_grad():
        model.eval()(batch(0, 0)[0])  # an evaluation in between
        model.train()
    train(model, optimizer, HALF)
    return {**results(pruner), "placements": str(model.head.parametrizations.weight.original)}


def hybrid(model: nn.Module) -> None:
    """Replicate over two processes instead of sharding: the mesh has two axes."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    shard_layers(model, mesh=mesh)


def resumed(folder: Path, *, full: bool) -> Result:
    """Write a checkpoint after half of the steps, and resume it in the other order."""
    model, pruner, optimizer = build("shard first")
    train(model, optimizer, 0, HALF)
    share_buffers(model)
    options = StateDictOptions(full_state_dict=full)
    weights, moments = get_state_dict(model, optimizer, options=options)
    counted = pruner.step_count
    state: Result = {"model": weights, "optimizer": moments}
    path = folder / f"checkpoint-{full}"
    if full and dist.get_rank() == 0:
        torch.save(state, path)
    elif not full:
        dcp.save(state, checkpoint_id=path)
    dist.barrier()

    model, pruner, optimizer = build("pruner first")
    if full:
        state = torch.load(path, weights_only=True)
    else:
        weights, moments = get_state_dict(model, optimizer, options=options)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    train(model, optimizer, HALF)
    return {**results(pruner), "counted": counted}


def other_layers(family: type[nn.Module], **more: Any) -> Result:
    """Prune a network with DDP, and sharded layer by layer before and after the pruner."""
    found = {}
    for order in ("ddp", "shard first", "pruner first"):
        torch.manual_seed(0)
        model = family()
        if order == "shard first":
            fully_shard(model.inner)
            fully_shard(model)
        pruner = prune(model, macs=0.7, **more)
        if order == "pruner first":
            fully_shard(model.inner)
            fully_shard(model)
        train(
            DistributedDataParallel(model) if order == "ddp" else model, optimizer_of(pruner, 0.02)
        )
        found[order] = results(pruner)
    return found


def read_by_one_process() -> Result:
    """Resume from a full checkpoint that only the first process has."""
    model, pruner, optimizer = build("pruner first")
    train(model, optimizer, 0, HALF)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if dist.get_rank():
        weights, moments = {}, {}

    model, pruner, optimizer = build("shard first")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, moments, options=options)
    train(model, optimizer, HALF)
    return results(pruner)


def exported_in_one_process() -> Result:
    """Export a full checkpoint of a sharded run in a process that knows nothing of the others."""
    model, pruner, optimizer = build("shard first")
    train(model, optimizer)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        model = make()
        pruner = prune(model)
        model.load_state_dict(weights)
        found = results(pruner)
        dist.barrier()
        return found
    dist.barrier()
    return {}


def sharded_refusals() -> Result:
    model, pruner, optimizer = build("shard first", compact="auto")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer)
    late = make()
    late_pruner = prune(late)
    late_optimizer = optimizer_of(late_pruner)
    shard_layers(late)
    parts = build("pruner first", lambda model: fully_shard(model.inner))
    return {
        "compact": raised(pruner.compact),
        "warnings": [str(one.message) for one in caught],
        "trace": raised(lambda: pp.trace(model, batch(0, 0)[0])),
        "late": raised(lambda: train(late, late_optimizer, 0, 1)),
        "parts": raised(lambda: train(parts[0], parts[2], 0, 1)),
    }


# --- tensor parallel ------------------------------------------------------------------------------


def tensor_parallel() -> Result:
    def parallelize(model: nn.Module) -> nn.Module:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def step() -> None:
        model = network()
        pruner = pp.Pruner(model, torch.randn(2, 6), macs=0.5, steps=4)
        optimizer = optimizer_of(pruner)
        model[0].weight  # noqa: B018
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
        optimizer.step()

    def both() -> pp.Pruner:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(network(), mesh["model"], plan)
        fully_shard(model, mesh=mesh["data"])
        return pp.Pruner(model, torch.randn(2, 6), macs=0.5, steps=4)

    return {
        "first": raised(
            lambda: pp.Pruner(parallelize(network()), torch.randn(2, 6), macs=0.5, steps=4)
        ),
        "later": raised(step),
        "both": raised(both),
    }


# --- a process dies -------------------------------------------------------------------------------


def dying(folder: Path, *, again: bool) -> Result:
    """Write a checkpoint at every step; process 1 dies in the middle, the first time."""
    path = folder / "run.pt"
    model = make()
    pruner = prune(model, compact="auto")
    states = torch.load(path, weights_only=True) if path.exists() else []
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(pruner)
    if states:
        model.load_state_dict(states[0])  # which brings the model to its widths
        optimizer.load_state_dict(states[1])
    start = pruner.step_count
    for step in range(start, STEPS):
        train(wrapped, optimizer, step, step + 1)
        if dist.get_rank() == 0 and step % 3 == 0:
            parts = [part.state_dict() for part in (model, optimizer)]
            torch.save(parts, f"{path}.new")
            os.replace(f"{path}.new", path)
        if not again and step == HALF + 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return {**results(pruner), "start": start}


# --- all of them ----------------------------------------------------------------------------------


def runs(folder: Path) -> dict[str, Callable[[], Result]]:
    return {
        "ddp": ddp,
        "ddp compacted": partial(ddp, "auto", forward_sync_buffers=False),
        "ddp compacted, unused": partial(ddp, "auto", allreduce_hook, find_unused_parameters=True),
        "ddp compacted by hand": ddp_compacted_by_hand,
        "ddp without norms": ddp_without_norms,
        "one process": one_process,
        "strange hook": ddp_with_strange_hook,
        "refused in one process": ddp_refused_in_one_process,
        "other budgets": ddp_with_other_budgets,
        "state entry": ddp_state_entry,
        "ddp checkpoint": partial(ddp_checkpoint, folder),
        "wrapped models": wrapped_models,
        "shard first": partial(sharded, "shard first"),
        "pruner first": partial(sharded, "pruner first"),
        "root only": partial(sharded, "pruner first", fully_shard),
        "hybrid": partial(sharded, "shard first", hybrid),
        "sharded checkpoint": partial(resumed, folder, full=False),
        "full checkpoint": partial(resumed, folder, full=True),
        "read by one process": read_by_one_process,
        "exported in one process": exported_in_one_process,
        "computed weights": partial(other_layers, ComputedWeights),
        "tied transformer": partial(other_layers, TiedTransformer, norms=True),
        "uniform widths": partial(other_layers, Repeated, uniform=True),
        "sharded refusals": sharded_refusals,
        "tensor parallel": tensor_parallel,
    }


def do_all(folder: Path, again: bool) -> None:
    """Do all runs in this process, or only resume the one in which a process died."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    wanted = {} if again else runs(folder)
    for name, run in {**wanted, "dying": partial(dying, folder, again=again)}.items():
        try:
            found = run()
        except Exception:
            found = {"failed": traceback.format_exc()}
        torch.save(found, folder / f"{name}.{dist.get_rank()}")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    assert not fork_two(partial(do_all, folder, again=False))  # one process kills itself at the end
    assert fork_two(partial(do_all, folder, again=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
