"""The examples in the docstrings of adapters run, given a model, its data and an example."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator

import polarprune as pp
from polarprune.integrations import accelerate, factories, lightning, loggers
from polarprune.integrations import transformers as hugging_face
from tests.helpers.adapters import BATCH, EXAMPLE, Classifier, Digits, WithLoss, loader
from tests.helpers.nets import digits_resnet
from tests.helpers.training import sgd

pytestmark = pytest.mark.filterwarnings("ignore")  # advice about workers, padding and early exports


def digits() -> dict[str, Any]:
    net = digits_resnet(4)
    return {"model": net, "module": Classifier(net), "example": EXAMPLE, "loader": loader()}


def pruned_digits() -> dict[str, Any]:
    scope = digits()
    pruner = pp.Pruner(scope["model"], EXAMPLE, macs=0.5, steps=10 * len(scope["loader"]))
    return {**scope, "pruner": pruner, "accelerator": Accelerator()}


def watched() -> dict[str, Any]:
    pruner = pruned_digits()["pruner"]
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    pruner.model(EXAMPLE).square().mean().backward()
    return {"pruner": pruner, "optimizer": optimizer}


def trainer() -> dict[str, Any]:
    args = transformers.TrainingArguments(
        "checkpoints", per_device_train_batch_size=BATCH, report_to="none", use_cpu=True
    )
    return {"model": WithLoss(digits_resnet(4)), "args": args, "data": Digits(as_dicts=True)}


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def language_model() -> dict[str, Any]:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    return {"model": model, "example": {"input_ids": torch.randint(3, 50, (2, 7))}, "steps": 10}


def pruned_language_model() -> dict[str, Any]:
    scope = language_model()
    settings = hugging_face.folder_settings(scope["model"], scope["example"])
    pruner = pp.Pruner(scope["model"], scope["example"], params=0.7, steps=10, **settings)
    for _ in range(10):
        pruner.step()
    return {**scope, "pruner": pruner, "tokenizer": Tokenizer()}


SETUPS: dict[Any, Callable[[], dict[str, Any]]] = {
    accelerate.optimizer_steps: digits,
    accelerate.attach: pruned_digits,
    factories.make_model: dict,
    factories.factory_code: dict,
    hugging_face.folder_settings: language_model,
    hugging_face.save_pretrained: pruned_language_model,
    hugging_face.PruningTrainer: trainer,
    lightning.PruningCallback: digits,
    loggers.watch: watched,
}


class Checker(doctest.OutputChecker):
    """Ignores what a framework prints where the example shows no output."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.parametrize("public", SETUPS, ids=lambda public: public.__name__)
def test_the_example_of_an_adapter_runs(
    public: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope = {"torch": torch, **SETUPS[public]()}
    if inspect.getmodule(public) is factories:
        scope[public.__name__] = public
    parser, name = doctest.DocTestParser(), public.__name__
    test = parser.get_doctest(inspect.getdoc(public) or "", scope, name, None, None)
    assert test.examples, f"{name} has no example"
    runner, said = doctest.DocTestRunner(Checker()), list[str]()
    runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
