"""Lightning: `Trainer(callbacks=[PruningCallback(macs=0.5)])`, with an unchanged module."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import PruneError
from ..torch_internals.markers import attached_state
from ..torch_internals.patches import optimizers_reported
from ..tracing.model_state import Example
from ..training.pruner import Pruner
from ..validation.optional_packages import missing_package
from .gate_group import separate_gates
from .loggers import watch
from .refusals import refuse

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import HalfPrecision
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.plugins import HalfPrecision
    except ImportError as error:
        raise missing_package(
            "lightning", needed_for="PruningCallback", extra="lightning"
        ) from error


class PruningCallback(Callback):
    """Prune a LightningModule to a budget while Lightning trains it.

    The module needs no changes. The gates go into the optimizer that `configure_optimizers` makes,
    in a group of their own, before its schedulers are made. The number of steps is that of the
    trainer. The pruner's state is in every checkpoint, and `trainer.fit(ckpt_path=...)` resumes it.
    All loggers of the trainer get the rows of `pruner.history`.

    Args:
        example_inputs: What the module's `forward` takes; by default its `example_input_array`.
        module: The name of the part to prune, such as "net"; by default the whole LightningModule.
        **settings: Arguments of `Pruner`, such as macs=0.5. `steps` is only needed where the
            trainer cannot know it: with manual optimization, or data without a length.

    Attributes:
        pruner: The `Pruner`, once `trainer.fit` has started.

    Raises:
        PruneError: From `trainer.fit`, as `Pruner` does; also if the number of steps is unknown.

    Example:
        >>> import lightning
        >>> from polarprune.integrations.lightning import PruningCallback
        >>> pruning = PruningCallback(example, module="net", macs=0.5)
        >>> trainer = lightning.Trainer(max_epochs=5, callbacks=[pruning])
        >>> trainer.fit(module, loader)
        >>> small = pruning.export()
    """

    def __init__(
        self, example_inputs: Example | None = None, *, module: str = "", **settings: Any
    ) -> None:
        self.example_inputs, self.module, self.settings = example_inputs, module, settings
        self._pruner: Pruner | None = None
        self._holder: Optimizer | None = None  # of the gates

    @property
    def pruner(self) -> Pruner:
        """The pruner; there is none before `trainer.fit`."""
        if self._pruner is None:
            raise PruneError("PruningCallback: there is no pruner yet; call trainer.fit first.")
        return self._pruner

    def export(self) -> nn.Module:
        """Return the small model, as `Pruner.export` does."""
        return self.pruner.export()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install gates after `configure_model` has run, before weights are loaded or wrapped."""
        if stage != "fit":
            return
        self._check(trainer)
        load, prepare = pl_module.on_load_checkpoint, trainer.strategy.setup

        def on_load_checkpoint(checkpoint: dict[str, object]) -> None:
            self._build(trainer, pl_module, trainer.callbacks)
            if "current_model_state" in checkpoint:  # WeightAveraging stored its average first
                pl_module.load_state_dict(checkpoint["current_model_state"])
            load(checkpoint)

        def strategy_setup(trainer: Trainer) -> None:
            self._build(trainer, pl_module, trainer.callbacks)
            with optimizers_reported(self._place_gates):
                prepare(trainer)  # wraps the model, and calls configure_optimizers

        pl_module.on_load_checkpoint = on_load_checkpoint
        trainer.strategy.setup = strategy_setup
        late = "configure_model", "setup"  # hooks that may make the network
        kind = type(pl_module)
        if all(getattr(kind, hook) is getattr(LightningModule, hook) for hook in late):
            earlier = trainer.callbacks[: trainer.callbacks.index(self)]
            self._build(trainer, pl_module, earlier)  # now, for callbacks that copy the module

    def _check(self, trainer: Trainer) -> None:
        """Refuse what a pruner cannot follow."""
        strategy = trainer.strategy
        wrong = {
            "it has pruned a model already. To resume, build the module and the callback again, "
            "and call trainer.fit(ckpt_path=...); to train on, fit a module that holds "
            "callback.export(), without the callback.": self._pruner is not None,
            f"{type(strategy).__name__} makes other parameters than the module has; train on one "
            f"device, or with strategy='ddp'.": strategy.restore_checkpoint_after_setup,
            "half precision is too coarse for the steps of gates; set precision='bf16-mixed' or "
            "'16-mixed'.": isinstance(trainer.precision_plugin, HalfPrecision),
        }
        refuse("PruningCallback", wrong)

    def _build(self, trainer: Trainer, pl_module: LightningModule, earlier: list[Callback]) -> None:
        """Build the pruner, unless that was done; `earlier` callbacks have been set up before."""
        if self._pruner is not None:
            return
        example = self.example_inputs
        if example is None:
            example = pl_module.example_input_array
        wrong = {
            "another callback copied the module before it got gates; let PruningCallback be the "
            "first of callbacks=[...], and make the network in __init__, without the hooks setup "
            "and configure_model.": _is_copied(pl_module, earlier),
            "give what the module's forward takes, as PruningCallback(example_inputs, ...), or set "
            "the module's example_input_array.": example is None,
        }
        refuse("PruningCallback", wrong)
        precision = trainer.precision_plugin  # it may convert the module to float64
        precision.convert_module(pl_module.to(trainer.strategy.root_device))
        settings = {"steps": trainer.estimated_stepping_batches, **self.settings}
        model = _part(pl_module, self.module)
        self._pruner = Pruner(model, precision.convert_input(example), **settings)

    def _place_gates(self, optimizer: Optimizer) -> None:
        """Give the gates to the first optimizer that holds weights of the pruned model."""
        if separate_gates(self.pruner, optimizer, taken=self._holder is not None):
            self._holder = optimizer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the pruner, and let the trainer's loggers watch it."""
        del pl_module.on_load_checkpoint, trainer.strategy.setup  # their own again
        if trainer.ckpt_path:  # the data were set up to count the steps, before their state is read
            trainer.fit_loop._combined_loader = None
        if self._holder is None:
            raise PruneError(
                "PruningCallback: configure_optimizers made no optimizer of torch that holds "
                "weights of the pruned model."
            )
        others = [one for one in trainer.optimizers if one is not self._holder]
        self.pruner.attach(self._holder, *others)
        self.pruner.copies = [  # averages that have had no update yet, too
            one
            for one in _held(trainer.callbacks)
            if any(map(attached_state, one.modules())) and self.pruner.model not in one.modules()
        ]
        for logger in trainer.loggers:
            watch(self.pruner, logger)


def _held(callbacks: list[Callback]) -> list[nn.Module]:
    """Return the modules that callbacks hold, such as averages of the trained one."""
    return [
        value for one in callbacks for value in vars(one).values() if isinstance(value, nn.Module)
    ]


def _is_copied(pl_module: LightningModule, callbacks: list[Callback]) -> bool:
    """Return whether one of these callbacks holds another module of the class of this one."""
    others = [one for one in _held(callbacks) if one is not pl_module]
    return any(isinstance(part, type(pl_module)) for one in others for part in one.modules())


def _part(pl_module: LightningModule, name: str) -> nn.Module:
    """Return the part to prune."""
    try:
        found: nn.Module = pl_module.get_submodule(name)
    except AttributeError as error:
        parts = ", ".join(part for part, _ in pl_module.named_children())
        raise PruneError(
            f"PruningCallback: {type(pl_module).__name__} has no module={name!r}; its parts are "
            f"{parts}."
        ) from error
    return found
