"""Bad input: refused on purpose, with the remedy in the message and the model unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import polarprune as pp
from tests.helpers.nets import digits_resnet
from tests.helpers.training import batches, prune, same_state, sgd, snapshot, train

IMAGE = torch.zeros(2, 1, 8, 8)


def hooks_of(model: nn.Module) -> list[list[int]]:
    return [[*m._forward_hooks, *m._forward_pre_hooks] for m in model.modules()]


@contextmanager
def refused(message: str, model: nn.Module) -> Iterator[None]:
    """The body raises PruneError with this wording, and the model is as it was before."""
    before, modes = snapshot(model), [module.training for module in model.modules()]
    classes, hooks = [type(module) for module in model.modules()], hooks_of(model)
    with pytest.raises(pp.PruneError, match=message):
        yield
    assert same_state(before, snapshot(model))
    assert [type(module) for module in model.modules()] == classes
    assert [module.training for module in model.modules()] == modes
    assert hooks_of(model) == hooks
    assert not any("forward" in vars(module) for module in model.modules())


@contextmanager
def never_gated(message: str, model: nn.Module) -> Iterator[None]:
    with refused(message, model):
        yield
    assert not any(parametrize.is_parametrized(module) for module in model.modules())


def setup(**settings: Any) -> tuple[pp.Pruner, torch.optim.Optimizer]:
    settings = {"steps": 4, **({} if "lam" in settings else {"macs": 0.5}), **settings}
    pruner = pp.Pruner(digits_resnet(8), IMAGE, **settings)
    return pruner, sgd(pruner)


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    return batches(count, channels=1, size=8)


# --- the model and the example --------------------------------------------------------------------


def test_a_model_without_prunable_channels_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    message = "no prunable channels: every group is frozen .*Print polarprune.trace"
    with never_gated(message, model):
        pp.Pruner(model, torch.randn(2, 4), macs=0.5, steps=10)


def test_a_model_that_is_kept_whole_is_refused_with_the_reason() -> None:
    model = digits_resnet(8)
    with never_gated(r"no prunable channels: .*keep='\*'", model):
        pp.Pruner(model, IMAGE, macs=0.5, steps=10, keep=["*"])


def test_a_keep_pattern_that_matches_nothing_is_refused() -> None:
    model = digits_resnet(8)
    with never_gated("keep: no module with parameters matches 'layer9'", model):
        pp.Pruner(model, IMAGE, macs=0.5, steps=10, keep=["layer9"])


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 8), (8,)], ids=str)
def test_an_example_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = digits_resnet(8)
    message = "the model does not run on the example inputs: .*Pass inputs of the shape"
    with never_gated(message, model):
        pp.Pruner(model, torch.zeros(shape), macs=0.5, steps=10)
    with never_gated(message, model):
        pp.trace(model, torch.zeros(shape))


def test_a_run_that_fails_is_refused_with_the_module_in_which_it_failed() -> None:
    model = digits_resnet(8)
    with never_gated(r"^0\.0: the model does not run on the example inputs", model):
        pp.trace(model, torch.zeros(2, 3, 8, 8))


def test_an_example_with_too_many_inputs_is_refused() -> None:
    model = digits_resnet(8)
    with never_gated("the model does not run on the example inputs", model):
        pp.Pruner(model, (IMAGE, IMAGE), macs=0.5, steps=10)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"input": x}])
def test_an_example_on_another_device_is_refused(wrap: Any) -> None:
    model = digits_resnet(8)
    message = "the example inputs are on meta, the model is on cpu: move the example"
    with never_gated(message, model):
        pp.Pruner(model, wrap(IMAGE.to("meta")), macs=0.5, steps=10)


def test_a_model_that_has_gates_already_is_refused() -> None:
    pruner, _ = setup()
    message = "the model has gates already: use the Pruner that put them there"
    with refused(message, pruner.model):
        pp.Pruner(pruner.model, IMAGE, macs=0.5, steps=4)
    with refused(message, pruner.model):
        pp.trace(pruner.model, IMAGE)
    by_hand = nn.Sequential(nn.Linear(4, 6), pp.Gate(6), nn.Linear(6, 2))
    with never_gated(message, by_hand):
        pp.Pruner(by_hand, torch.randn(2, 4), macs=0.5, steps=4)


def test_a_model_in_distributed_data_parallel_is_refused() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = digits_resnet(8)
        wrapped = nn.parallel.DistributedDataParallel(model)
        message = r"wrapped in DistributedDataParallel: .*plain model \(model.module\) first"
        with never_gated(message, model):
            pp.Pruner(wrapped, IMAGE, macs=0.5, steps=4)
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_in_data_parallel_is_refused() -> None:
    model = digits_resnet(8)
    with never_gated("the model is wrapped in DataParallel", model):
        pp.Pruner(nn.DataParallel(model), IMAGE, macs=0.5, steps=4)


def test_a_compiled_model_is_refused() -> None:
    model = digits_resnet(8)
    message = "the model is compiled: give polarprune the plain model first"
    with never_gated(message, model):
        pp.Pruner(torch.compile(model, backend="eager"), IMAGE, macs=0.5, steps=4)
    with never_gated(message, model):
        pp.trace(torch.compile(model, backend="eager"), IMAGE)


def test_a_model_compiled_in_place_is_refused() -> None:
    model = digits_resnet(8)
    model.compile(backend="eager")
    with never_gated("the model is compiled", model):
        pp.Pruner(model, IMAGE, macs=0.5, steps=4)


# --- the settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 0.0, 1.0, 1.5, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("key", ["macs", "params"])
def test_a_budget_outside_zero_to_one_is_refused(key: str, budget: float) -> None:
    model = digits_resnet(8)
    message = f"{key}={budget}: a budget is a fraction of the original, between 0 and 1"
    with never_gated(message, model):
        pp.Pruner(model, IMAGE, **{key: budget}, steps=4)


@pytest.mark.parametrize("budgets", [{"macs": 0.5}, {"params": 0.5}, {"macs": 0.5, "params": 0.3}])
def test_a_budget_and_lam_conflict(budgets: dict[str, float]) -> None:
    model = digits_resnet(8)
    named = " and ".join(budgets)
    message = f"conflicting settings: lam=1.0 .*{named} sets? it. Give a budget or lam, not both"
    with never_gated(message, model):
        pp.Pruner(model, IMAGE, **budgets, lam=1.0, steps=4)


def test_neither_a_budget_nor_lam_is_refused() -> None:
    model = digits_resnet(8)
    with never_gated("no goal: give a budget", model):
        pp.Pruner(model, IMAGE, steps=4)


@pytest.mark.parametrize("lam", [0, -1.0, math.nan])
def test_a_lam_that_is_not_positive_is_refused(lam: float) -> None:
    model = digits_resnet(8)
    with never_gated(f"lam={lam}: must be positive", model):
        pp.Pruner(model, IMAGE, lam=lam, steps=4)


@pytest.mark.parametrize("steps", [0, -3, 2.5, 10.0, "ten", None])
def test_steps_that_are_no_positive_whole_number_are_refused(steps: Any) -> None:
    model = digits_resnet(8)
    with never_gated(f"steps={steps!r}: give the number of optimizer steps", model):
        pp.Pruner(model, IMAGE, macs=0.5, steps=steps)


@pytest.mark.parametrize("multiple", [0, -8, 1.5, "8", None])
def test_a_multiple_that_is_no_positive_whole_number_is_refused(multiple: Any) -> None:
    model = digits_resnet(8)
    with never_gated(f"multiple_of={multiple!r}: give a positive integer", model):
        pp.Pruner(model, IMAGE, macs=0.5, steps=4, multiple_of=multiple)


def test_a_budget_out_of_reach_is_refused_before_training() -> None:
    model = digits_resnet(8)
    with never_gated(r"budget out of reach: macs=0\.05 \(the lowest is 0\.\d{4}\)", model):
        pp.Pruner(model, IMAGE, macs=0.05, steps=4, keep=["1", "3"])


# --- the training ---------------------------------------------------------------------------------


ALL_DONE = r"steps: 4 steps were announced and all are done; gates stay .*epochs \* len"


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_after_the_announced_steps_gates_stay_and_the_training_goes_on(
    attached: bool, momentum: float
) -> None:
    pruner, _ = setup()
    optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05), momentum=momentum)
    if attached:
        pruner.attach(optimizer)
    after = (lambda: None) if attached else pruner.step
    train(pruner.model, optimizer, data(4), after)
    flat, history, plan = pruner._run.stepper.last(), list(pruner.history), pruner.plan()
    weight = next(p for p in pruner.model.parameters() if p.dim() == 4)
    before = weight.detach().clone()
    with pytest.warns(UserWarning, match=ALL_DONE) as caught:
        train(pruner.model, optimizer, data(3), after)
    assert len(caught) == 1
    assert not torch.equal(weight, before)
    assert torch.equal(pruner._run.stepper.last(), flat) and pruner.history == history
    assert pruner.step_count == 4 and pruner.plan() == plan
    pruner.export()


def test_a_run_that_was_resumed_at_its_end_holds_its_gates_too() -> None:
    first = prune(digits_resnet(8), 4, channels=1, size=8, macs=0.5)
    pruner, optimizer = setup()
    pruner.attach(optimizer)
    pruner.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match=ALL_DONE):
        train(pruner.model, optimizer, data(2))
    assert torch.equal(pruner._run.stepper.last(), first._run.stepper.last())
    assert pruner.step_count == 4


def test_an_early_export_warns() -> None:
    pruner, optimizer = setup(steps=10)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data(8))
    with pytest.warns(UserWarning, match=r"export: 8 of 10 steps were taken.*Continue training"):
        pruner.export()
    train(pruner.model, optimizer, data(1))
    pruner.export()


def test_warnings_point_to_the_line_of_the_user() -> None:
    pruner, optimizer = setup()
    train(pruner.model, optimizer, data(2), pruner.step)
    with pytest.warns(UserWarning, match="export: 2 of 4 steps") as early:
        pruner.export()
    train(pruner.model, optimizer, data(2), pruner.step)
    with pytest.warns(UserWarning, match=ALL_DONE) as late:
        pruner.step()
    fresh = pp.Pruner(digits_resnet(8), IMAGE, macs=0.5, steps=4)
    with pytest.warns(UserWarning, match="gates share a parameter group") as mixed:
        fresh.attach(torch.optim.SGD(fresh.model.parameters(), lr=0.1))
    assert [caught[0].filename for caught in (early, late, mixed)] == [__file__] * 3


def test_a_training_that_ends_before_the_budget_is_met_warns_once() -> None:
    pruner, optimizer = setup(steps=40)
    pruner.attach(optimizer)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    message = r"step 5 of 40: the learning rate is 0, but the budget will only be met at step 20"
    with pytest.warns(UserWarning, match=message) as caught:
        train(pruner.model, optimizer, data(8), decay.step)
    assert len(caught) == 1


def test_a_rate_that_falls_early_warns_before_the_training_ends() -> None:
    pruner, optimizer = setup(steps=100)  # announced; the training takes 40
    pruner.attach(optimizer)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    train(pruner.model, optimizer, data(36), decay.step)
    message = r"step 38 of 100: the learning rate is 1\.4% of its highest value, but the budget wi"
    with pytest.warns(UserWarning, match=message) as caught:
        train(pruner.model, optimizer, data(4), decay.step)
    assert len(caught) == 1


def test_gates_that_do_not_close_are_noticed_early() -> None:
    pruner, optimizer = setup(steps=200)
    pruner.attach(optimizer)
    message = (
        r"step 5\d of 200: the cost does not follow its path: 1\.000 of the MACs are left, and"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        for _ in range(80):  # what was replayed does not hold the step of the optimizer
            pruner.replayed()
    assert len(caught) == 1


def test_a_rate_that_begins_at_zero_does_not_warn() -> None:
    pruner, optimizer = setup(steps=40)
    pruner.attach(optimizer)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    train(pruner.model, optimizer, data(8), warm_up.step)
    assert pruner.step_count == 8


def test_gates_that_are_opened_from_outside_after_the_landing_are_noticed() -> None:
    pruner, optimizer = setup(steps=10)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data(6))
    pruner._run.stepper.put(torch.ones_like(pruner._run.stepper.last()))
    message = r"step 7 of 10: the budget was met before, but the model has 1\.000 of its MACs now"
    with pytest.warns(UserWarning, match=message):
        train(pruner.model, optimizer, data(2))


def test_export_before_the_budget_is_met_is_refused() -> None:
    pruner, optimizer = setup(steps=10)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data(10)[:4])
    message = (
        r"export: the budget is not met yet: macs \d\.\d+ \(budget 0\.5\); 4 of 10 steps were "
        r"taken, and it is met at step 5\. Continue.* [Ii]s pruner.attach\(optimizer\) called"
    )
    with refused(message, pruner.model):
        pruner.export()


def test_export_without_any_step_is_refused() -> None:
    pruner, optimizer = setup()
    train(pruner.model, optimizer, data(4))  # attach was forgotten
    with refused(r"0 of 4 steps were taken.*[Ii]s pruner.attach\(optimizer\) called", pruner.model):
        pruner.export()


def test_export_in_plain_mode_before_the_last_step_is_refused() -> None:
    pruner, optimizer = setup(lam=1.0)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data(4)[:3])
    with refused("export: 3 of 4 steps were taken. Continue training", pruner.model):
        pruner.export()


def test_export_of_a_model_that_is_over_its_budget_again_is_refused() -> None:
    pruner = prune(digits_resnet(8), 4, channels=1, size=8, macs=0.5)
    with torch.no_grad():  # as an old checkpoint would, loaded into the model alone
        for gate in pruner.gates.values():
            gate.alpha.fill_(1.0)
    with refused(r"export: the budget is not met.*macs 1\.000 \(budget 0\.5\)", pruner.model):
        pruner.export()


def test_a_state_of_a_higher_budget_does_not_pass_for_a_lower_one() -> None:
    pruner = prune(digits_resnet(8), 4, channels=1, size=8, macs=0.5)
    lower, _ = setup(macs=0.3)
    with pytest.raises(pp.PruneError):
        lower.load_state_dict(pruner.state_dict())
        lower.export()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gate_that_is_not_finite_is_refused_by_name(value: float) -> None:
    pruner, _ = setup()
    name, gate = list(pruner.gates.items())[1]
    with torch.no_grad():
        gate.alpha[2] = value
    message = (
        rf"{name}: its gate has become NaN or infinite \(1 groups\)\. The training has diverged"
    )
    with pytest.raises(pp.PruneError, match=message):
        pruner.step()


def test_a_gate_that_is_not_finite_is_not_exported() -> None:
    pruner = prune(digits_resnet(8), 4, channels=1, size=8, macs=0.5)
    with torch.no_grad():
        pruner.gates["0.0"].alpha[0] = math.nan
    with refused("0.0: its gate has become NaN or infinite", pruner.model):
        pruner.export()


def test_a_refused_step_with_nan_changes_nothing() -> None:
    pruner, _ = setup()
    with torch.no_grad():
        pruner.gates["0.0"].alpha[0] = math.nan
    with refused("its gate has become NaN or infinite", pruner.model):
        pruner.step()
    assert pruner.step_count == 0


def test_a_loss_of_nan_is_refused_in_the_training_loop() -> None:
    pruner, optimizer = setup()
    pruner.attach(optimizer)
    images, labels = data(1)[0]
    with pytest.raises(pp.PruneError, match="NaN or infinite"):
        train(pruner.model, optimizer, [(images * math.nan, labels)])


# --- the optimizer --------------------------------------------------------------------------------


def test_gates_in_a_group_with_weight_decay_are_refused_with_the_remedy() -> None:
    pruner, _ = setup()
    optimizer = torch.optim.SGD(pruner.model.parameters(), lr=0.1, weight_decay=5e-4)
    message = (
        r"attach: gates \(for one, of .*\) are in a parameter group with weight decay 0.0005.*"
        r"build the optimizer with pruner.param_groups\("
    )
    with refused(message, pruner.model):
        pruner.attach(optimizer)
    with refused("weight decay 0.01", pruner.model):
        pruner.attach(torch.optim.AdamW(pruner.model.parameters()))


def test_an_optimizer_without_the_gates_is_refused_with_the_remedy() -> None:
    model = digits_resnet(8)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pp.Pruner(model, IMAGE, macs=0.5, steps=4)
    message = "attach: the optimizer does not hold the gates: build the optimizer with"
    with refused(message, model):
        pruner.attach(before)
    first = next(iter(pruner.gates.values()))
    with refused(message, model):
        pruner.attach(torch.optim.SGD([first.alpha], lr=0.1))


def test_a_refused_optimizer_can_be_corrected_and_attached() -> None:
    pruner, optimizer = setup()
    wrong = torch.optim.SGD(pruner.model.parameters(), lr=0.1, weight_decay=5e-4)
    with refused("weight decay", pruner.model):
        pruner.attach(wrong)
    pruner.attach(optimizer)
    train(pruner.model, optimizer, data(4))
    pruner.export()


def test_attaching_twice_is_refused() -> None:
    pruner, optimizer = setup()
    pruner.attach(optimizer)
    with refused("attach: this pruner is attached already", pruner.model):
        pruner.attach(optimizer)
    train(pruner.model, optimizer, data(1))
    assert pruner.step_count == 1


def test_attaching_to_something_else_is_refused() -> None:
    pruner, _ = setup()
    with refused("attach: Linear is not a torch.optim.Optimizer; attach to the raw", pruner.model):
        pruner.attach(nn.Linear(2, 2))
