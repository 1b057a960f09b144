"""The config of a pruned model has its sizes, or `save_pretrained` refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import polarprune as pp
from polarprune.surgery.config_models import with_weights_of, without_weights
from polarprune.surgery.config_proof import update_config
from polarprune.surgery.config_sizes import ConfigSearch
from polarprune.torch_internals.refused_methods import Refusal
from tests.helpers.sized_nets import EvenSizes, Perceptrons, Sized, perceptrons

X = torch.randn(4, 6)
INNER = {"blocks.0.0": [0, 2, 4, 6], "blocks.1.0": [1, 3, 5, 7]}


def pruned(model: nn.Module, plan: dict[str, list[int]], example: Any = X) -> Any:
    small = pp.shrink(model, pp.trace(model, X), plan)
    update_config(small, example)
    return small


def refusal(small: Any) -> str:
    with pytest.raises(pp.PruneError) as caught:
        small.save_pretrained("folder")
    return str(caught.value)


def test_one_number_for_all_blocks_follows_equal_widths() -> None:
    small = pruned(perceptrons(), INNER)
    assert small.config.inner == 4 and small.config.width == 6
    small.save_pretrained("folder")


def test_each_entry_of_a_list_is_a_number_of_its_own() -> None:
    small = pruned(perceptrons(), {"stages.0": [0, 1, 2], "stages.1": [0, 1, 2, 3, 4]})
    assert small.config.stages == [3, 5]


def test_a_number_that_the_config_implies_is_written() -> None:
    model = perceptrons(inner=None)
    assert model.blocks[0][0].out_features == 24  # type: ignore[index]
    small = pruned(model, INNER)
    assert small.config.inner == 4
    torch.testing.assert_close(with_weights_of(small, small.config)(X), small(X))


def test_the_original_keeps_its_config() -> None:
    model = perceptrons()
    pruned(model, INNER)
    assert model.config.inner == 10
    model.save_pretrained("folder")


def test_blocks_of_different_widths_are_refused() -> None:
    small = pruned(perceptrons(), {"blocks.0.0": [0, 2, 4], "blocks.1.0": [0, 1, 2, 3]})
    assert small.config.inner == 10
    message = refusal(small)
    assert "inner is one number for all blocks, but blocks.0.0.weight (axis 0: 3)" in message
    assert "uniform=True" in message and "polarprune.save" in message


@pytest.mark.parametrize("scaled", [0.1, 1e-7])  # by more than rounding, and by less in float32
def test_a_scale_that_follows_from_a_width_is_refused(scaled: float) -> None:
    small = pruned(perceptrons(scaled=scaled), {"stages.0": [0, 1, 2]})
    assert small.config.stages == [8, 8]
    message = refusal(small)
    assert "with stages.0 as pruned has the right shapes, but its outputs differ by" in message
    assert "perhaps because of scale" in message


def test_sizes_that_the_config_refuses_are_refused() -> None:
    odd = {"blocks.0.0": [0, 1, 2], "blocks.1.0": [0, 1, 2]}
    assert "EvenSizes refuses the pruned sizes: inner has to be even" in refusal(
        pruned(perceptrons(EvenSizes), odd)
    )
    assert pruned(perceptrons(EvenSizes), INNER).config.inner == 4


def test_sizes_with_which_the_class_cannot_be_built_are_refused_with_its_error() -> None:
    class Divisible(Perceptrons):
        def __init__(self, config: Any) -> None:
            if config.inner % 5:
                raise ValueError(f"inner={config.inner} is not a multiple of 5")
            super().__init__(config)

    message = refusal(pruned(Divisible(perceptrons().config), INNER))
    assert "Divisible cannot be built: ValueError: inner=4 is not a multiple of 5" in message


def test_sizes_with_which_the_class_does_not_run_are_refused_with_its_error() -> None:
    class Rigid(Perceptrons):
        def forward(self, x: Any) -> Any:
            if self.config.inner == 4:
                raise RuntimeError("inner=4 does not run")
            return super().forward(x)

    message = refusal(pruned(Rigid(perceptrons().config), INNER))
    assert "Rigid built with inner as pruned does not run: RuntimeError: inner=4 does" in message
    assert "keep=[...]" in message and "inf" not in message


def test_a_layer_without_channels_is_refused() -> None:
    assert "has other layers than the pruned model, such as blocks.0" in refusal(
        pruned(perceptrons(), {"blocks.0.0": []})
    )


def test_without_an_example_plain_saving_is_refused() -> None:
    message = refusal(pruned(perceptrons(), INNER, example=None))
    assert "Use save_pretrained(model, folder, example)" in message


def test_a_model_that_was_not_cut_may_be_saved() -> None:
    model = perceptrons()
    pp.shrink(model, pp.trace(model, X), {}).save_pretrained("folder")  # type: ignore[operator]


def test_a_model_without_such_a_config_is_refused() -> None:
    class Other(Sized):
        def __init__(self) -> None:
            super().__init__({"width": 5})
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x))

    assert "is not built from a config" in refusal(pruned(Other(), {"first": [0, 1]}))


def test_a_model_inside_of_another_one_refuses_alone() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = perceptrons()

        def forward(self, x: Any) -> Any:
            return self.model(x)

    small = pruned(Wrapper(), {f"model.{name}": kept for name, kept in INNER.items()})
    assert refusal(small.model).startswith("save_pretrained: ")


def test_copies_and_pickles_refuse_and_a_second_pruning_decides_again() -> None:
    small = pruned(perceptrons(), {"blocks.0.0": [0, 2, 4]})
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small)), copy.copy(small)):
        assert isinstance(vars(twin)["save_pretrained"], Refusal)
        assert refusal(twin) == refusal(small)
    assert "save_pretrained" not in vars(perceptrons())
    again = pruned(small, {"blocks.1.0": [0, 2, 4]})
    assert again.config.inner == 3
    again.save_pretrained("folder")


def test_a_loaded_file_refuses_plain_saving(tmp_path: Any) -> None:
    small = pruned(perceptrons(), INNER)
    pp.save(small, tmp_path / "small.safetensors")
    assert "has the sizes before pruning" in refusal(
        pp.load(tmp_path / "small.safetensors", model=perceptrons())
    )


def test_an_export_tells_its_sizes() -> None:
    model = perceptrons(depth=1, stages=[])
    pruner = pp.Pruner(model, X, macs=0.5, steps=12)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.01))
    pruner.attach(optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    small: Any = pruner.export()
    assert small.config.inner == small.blocks[0][0].out_features < 10
    small.save_pretrained("folder")


def test_models_without_weights_take_no_memory_and_no_random_numbers() -> None:
    state = torch.get_rng_state()
    empty = without_weights(Perceptrons, perceptrons().config)
    torch.set_rng_state(state)
    assert all(p.is_meta for p in empty.parameters())
    found = ConfigSearch(perceptrons())
    before = torch.get_rng_state()
    assert found.measure({("inner",): 7}) is not None
    assert found.measure({("inner",): -1}) is None
    assert torch.equal(torch.get_rng_state(), before)
