"""Hugging Face: the optimizer's groups, the best model, checkpoints and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import polarprune as pp
from polarprune.integrations.loggers import watch
from polarprune.integrations.transformers import PruningTrainer
from tests.helpers.adapters import BATCH, BATCHES, EPOCHS, STEPS, Digits, StopAndSave, WithLoss
from tests.helpers.nets import digits_resnet
from tests.helpers.processes import run_module
from tests.helpers.training import alphas, share

pytestmark = [
    pytest.mark.usefixtures("quick_collections", "shared_traces"),
    pytest.mark.filterwarnings("ignore"),  # advice about devices and logs
]


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder),
        **{
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": BATCH,
            "learning_rate": 0.01,
            "weight_decay": 0.01,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "logging_steps": BATCHES,
            **options,
        },
    )


def trainer(
    folder: Path, model: nn.Module | None = None, kind: Any = PruningTrainer, **options: Any
) -> Any:
    given = {name: options.pop(name) for name in ("optimizers", "model_init") if name in options}
    made = kind(
        model=None if "model_init" in given else model or WithLoss(digits_resnet(8)),
        args=arguments(folder, **options),
        train_dataset=Digits(as_dicts=True),
        eval_dataset=Digits(as_dicts=True),
        pruning={"macs": 0.5},
        **given,
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def vit() -> Any:
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def scheduled() -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


class Pictures(Digits):
    """The same data under the names that the models of transformers use."""

    def __getitem__(self, index: int) -> Any:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def names(model: nn.Module, group: dict[str, Any]) -> set[str]:
    known = {id(p): name for name, p in model.named_parameters()}
    return {known[id(p)] for p in group["params"]}


def test_weights_are_decayed_and_biases_norms_and_gates_are_not(tmp_path: Path) -> None:
    model = vit()
    made = trainer(tmp_path, model, max_steps=4)
    made.train_dataset = Pictures()
    made.train()
    weights, plain, gates = made.optimizer.param_groups
    assert [group["weight_decay"] for group in (weights, plain, gates)] == [0.01, 0, 0]
    assert gates["initial_lr"] == pytest.approx(weights["initial_lr"] / 10)
    assert names(model, gates) == {n for n, p in model.named_parameters() if n.endswith(".alpha")}
    assert all("bias" in name or "layernorm" in name for name in names(model, plain))
    assert not any("bias" in name or "layernorm" in name for name in names(model, weights))
    together = [id(p) for group in (weights, plain, gates) for p in group["params"]]
    assert sorted(together) == sorted(id(p) for p in model.parameters())


def test_a_model_of_transformers_resumes_from_safetensors(tmp_path: Path) -> None:
    def run(folder: Path, until: int, resume: bool = False) -> Any:
        torch.manual_seed(0)
        made = trainer(folder, vit(), learning_rate=0.003)
        made.pruning = {"macs": 0.5, "norms": True, "compact": "auto"}
        made.train_dataset = Pictures()
        made.add_callback(StopAndSave(until))
        made.train(resume_from_checkpoint=resume)
        return made

    whole = run(tmp_path / "whole", EPOCHS)
    run(tmp_path / "part", 3)
    assert (tmp_path / "part" / f"checkpoint-{3 * BATCHES}" / "model.safetensors").exists()
    resumed = run(tmp_path / "part", EPOCHS, resume=True)
    assert torch.equal(alphas(resumed.pruner), alphas(whole.pruner))
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.pruner.compactions and share(whole.pruner)["macs"] <= 0.5
    assert isinstance(whole.export(), transformers.ViTForImageClassification)


def test_a_run_that_was_stopped_resumes_in_the_same_trainer(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    stop = StopAndSave(2)
    made.add_callback(stop)
    made.train()
    assert made.pruner.step_count == 2 * BATCHES
    made.remove_callback(stop)
    made.train(resume_from_checkpoint=True)
    assert made.pruner.step_count == STEPS and share(made.pruner)["macs"] <= 0.5
    made.export()


def test_the_best_model_is_one_that_meets_the_budget(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="step",
        greater_is_better=False,  # the sooner, the better
    )
    made.compute_metrics = lambda _: {"step": made.state.global_step}
    made.train()
    assert STEPS / 2 <= made.state.best_global_step == made.state.best_metric == 3 * BATCHES
    assert made.pruner.step_count == 3 * BATCHES and share(made.pruner)["macs"] <= 0.5
    made.export()


def test_a_pruned_model_that_refuses_plain_saving_is_pruned_again(tmp_path: Path) -> None:
    model = vit()
    graph = pp.trace(model, Pictures().images[:2])
    small = pp.shrink(model, graph, {"vit.layers.0.mlp.fc1": [0, 1, 2, 3]})
    made = trainer(tmp_path, small, max_steps=4, save_strategy="steps", save_steps=2)
    made.train_dataset = Pictures()
    made.train()
    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    with pytest.raises(pp.PruneError, match="sizes before pruning"):
        made.model.save_pretrained(tmp_path / "small")


def test_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, gradient_accumulation_steps=3, num_train_epochs=4)
    made.train()
    assert made.pruner.step_count == made.pruner.steps == 4 * 3  # 8 batches: 3, 3 and 2


def test_the_logs_have_the_share_that_is_left(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train()
    row = made.state.log_history[-1]
    assert row["macs_left"] == share(made.pruner)["macs"]
    assert row["params_left"] == share(made.pruner)["params"]
    assert json.dumps(made.state.log_history)


def test_an_optimizer_that_is_given_gets_the_gates(tmp_path: Path) -> None:
    model = WithLoss(digits_resnet(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    made = trainer(tmp_path, model, optimizers=(optimizer, None))
    made.train()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0]
    assert share(made.pruner)["macs"] <= 0.5


def test_another_trainer_can_be_the_second_base(tmp_path: Path) -> None:
    class Both(PruningTrainer, transformers.Seq2SeqTrainer):
        pass

    folder = tmp_path
    made = Both(
        WithLoss(digits_resnet(8)),
        transformers.Seq2SeqTrainingArguments(**arguments(folder, max_steps=10).to_dict()),
        train_dataset=Digits(as_dicts=True),
        pruning={"macs": 0.5},
    )
    made.train()
    assert share(made.pruner)["macs"] <= 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_init": lambda: WithLoss(digits_resnet(8))}, r"give model=\.\.\., since"),
        ({"optimizers": scheduled()}, "override create_scheduler"),
        ({"auto_find_batch_size": True}, "changes the number of steps during the training"),
    ],
)
def test_what_a_pruner_cannot_follow_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(pp.PruneError, match=message):
        trainer(tmp_path, **options)


WORKING = {
    "fsdp_version": 2,
    "state_dict_type": "StateDictType.SHARDED_STATE_DICT",
    "activation_checkpointing": False,
    "cpu_ram_efficient_loading": False,
}


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("fsdp_version", 1, "version 1 does not work; set 2 in fsdp_config"),
        (
            "state_dict_type",
            "StateDictType.FULL_STATE_DICT",
            "FULL_STATE_DICT does not work; set state_dict_type",
        ),
        ("activation_checkpointing", True, "fsdp_config does not work; set gradient_checkpointing"),
        (
            "cpu_ram_efficient_loading",
            True,
            "cpu_ram_efficient_loading does not work; set False in fsdp_config",
        ),
        ("", None, "load_best_model_at_end does not work; set False"),
    ],
)
def test_options_of_fsdp_are_refused(
    option: str, value: object, remedy: str, tmp_path: Path
) -> None:
    class Sharded(PruningTrainer):
        def _check(self) -> None:
            self.is_fsdp_enabled, self.args.load_best_model_at_end = True, not option
            plugin = SimpleNamespace(**WORKING | ({option: value} if option else {}))
            self.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
            super()._check()

    with pytest.raises(pp.PruneError, match=f"PruningTrainer with FSDP: .*{remedy}"):
        trainer(tmp_path, kind=Sharded)


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    class Sharded(PruningTrainer):
        def _check(self) -> None:
            self.is_deepspeed_enabled = True
            super()._check()

    with pytest.raises(pp.PruneError, match="DeepSpeed and XLA's FSDP make other parameters"):
        trainer(tmp_path, kind=Sharded)


def test_fsdp2_in_two_processes(tmp_path: Path) -> None:
    run_module("tests.helpers.fsdp_trainer", tmp_path)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one["whole"]["weights"] == other["whole"]["weights"] == one["resumed"]["weights"]
    for found in (one["whole"], one["resumed"]):
        assert found["sharded"] == "DTensor" and found["steps"] == [20, 20]
        assert found["left"] <= 0.5 and found["proof"] < 1e-5
        assert found["rates"] == pytest.approx([0.01, 0.01, 0.001])


def test_the_trainer_itself_can_watch_its_pruner(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    watch(made.pruner, made)
    made.train()
    rows = [row for row in made.state.log_history if "pruning/step" in row]
    assert [row["pruning/macs"] for row in rows] == [r["macs"] for r in made.pruner.history[1:]]


def test_an_export_before_the_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pp.PruneError, match="the budget is not met yet"):
        trainer(tmp_path).export()
