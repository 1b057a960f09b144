"""The proof finds differences in small numbers beside large ones, on other inputs and modes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from polarprune.errors import reason_given
from polarprune.report.report import Report
from polarprune.rewriting.node_functions import OtherSizes
from polarprune.surgery.cut_proof import prove_cut
from polarprune.surgery.other_inputs import fresh_inputs
from polarprune.surgery.precision import WidensOnReading
from polarprune.surgery.proof import difference, prove_equal, relative_gap
from tests.helpers.training import sgd

INF, NAN = float("inf"), float("nan")


class Masked(nn.Module):
    """A model whose first logit is replaced."""

    def __init__(self, by: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.by = nn.Linear(6, 16), nn.Linear(16, 4), by

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).masked_fill(torch.arange(4) == 0, self.by)


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def attached(pruner: pp.Pruner) -> Any:
    optimizer = sgd(pruner)
    pruner.attach(optimizer)
    return optimizer


def trained(model: nn.Module, x: Any, steps: int = 30, **settings: Any) -> pp.Pruner:
    pruner = pp.Pruner(model, x, steps=steps, **{"macs": 0.5, **settings})
    optimizer = attached(pruner)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(x)
        out[out.isfinite() & (out.abs() < 1e6)].square().mean().backward()
        optimizer.step()
    return pruner


# --- the measure ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [-1e9, -INF, INF, NAN])
def test_a_constant_in_the_output_hides_nothing(by: float) -> None:
    one = Masked(by)
    other = copy.deepcopy(one)
    assert difference(one, other, X, training=False) == 0
    with torch.no_grad():
        other.a.weight.mul_(1.1)
    assert difference(one, other, X, training=False) > 0.01


@pytest.mark.parametrize("by", [-1e9, -INF, INF, NAN])
def test_models_with_such_outputs_are_pruned(by: float) -> None:
    pruner = trained(Masked(by), X)
    small = pruner.export().eval()
    assert pruner.cost()["macs"] <= 0.5 * pruner.graph.cost.original()["macs"]
    with torch.no_grad():
        torch.testing.assert_close(small(X), pruner.model.eval()(X), equal_nan=True)


def test_places_that_are_not_finite_have_to_agree() -> None:
    a = torch.tensor([1.0, INF, -INF, NAN])
    assert relative_gap(a, a.clone()) == 0
    for place, value in ((1, -INF), (1, NAN), (1, 1.0), (3, INF), (3, 0.0), (0, NAN), (0, INF)):
        b = a.clone()
        b[place] = value
        assert relative_gap(a, b) == INF, (place, value)


def test_shapes_types_and_integers_have_to_be_the_same() -> None:
    a = torch.ones(3)
    assert relative_gap(a, torch.ones(4)) == relative_gap(a, a.double()) == INF
    assert relative_gap(torch.tensor([1, 2]), torch.tensor([1, 3])) == INF
    assert relative_gap(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert relative_gap(torch.empty(0), torch.empty(0)) == 0
    assert relative_gap(torch.tensor([1j]), torch.tensor([1.1j])) == pytest.approx(0.1)


# --- other inputs ---------------------------------------------------------------------------------


def shapes(example: Any) -> dict[str, Any]:
    return {
        name: [tuple(x.shape) for x in (inputs if isinstance(inputs, tuple) else (inputs,))]
        for name, inputs in fresh_inputs(example)
    }


def test_fresh_inputs_have_other_values_and_sizes() -> None:
    pictures = torch.randn(2, 3, 8, 10)
    assert shapes(pictures) == {
        "other values": [(2, 3, 8, 10)],
        "another batch size": [(3, 3, 8, 10)],
        "another picture size": [(2, 3, 16, 20)],
    }
    found = dict(fresh_inputs(pictures))["other values"]
    assert not torch.equal(found, pictures)
    assert torch.equal(found.flatten().sort().values, pictures.flatten().sort().values)
    both = (torch.zeros(2, 7, dtype=torch.long), torch.ones(2, 7))
    assert shapes(both)["another size of axis 1"] == [(2, 8), (2, 8)]
    assert shapes(torch.tensor(1.0)) == {}


def test_a_difference_on_other_sizes_only_is_found() -> None:
    class Odd(nn.Module):
        def __init__(self, wrong: float) -> None:
            super().__init__()
            self.a, self.wrong = nn.Conv2d(3, 3, 1), wrong
            nn.init.eye_(self.a.weight.flatten(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * (1 if x.shape[-1] == 8 else self.wrong)

    x = torch.randn(2, 3, 8, 8)
    one, other = Odd(1.0), Odd(2.0)
    other.load_state_dict(one.state_dict())
    assert prove_equal(one, other, x, 1e-5).differences.keys() == {"eval", "train"}
    with pytest.raises(pp.PruneError, match="another picture size"):
        prove_equal(one, other, x, 1e-5, fresh_inputs(x))


def test_an_export_says_on_which_inputs_it_was_compared() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    pruner = trained(model, torch.randn(2, 3, 8, 8))
    pruner.export()
    assert pruner.proof.keys() == {
        "eval",
        "train",
        "other values",
        "another batch size",
        "another picture size",
    }
    assert max(pruner.proof.values()) < 1e-5


def test_a_cut_model_that_fails_on_another_batch_is_refused() -> None:
    class OnlyTwo(nn.Module):
        def __init__(self, strict: bool) -> None:
            super().__init__()
            self.a, self.strict = nn.Linear(6, 2), strict

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.view(2, 6) if self.strict else x)

    one, other, x = OnlyTwo(False), OnlyTwo(True), torch.randn(2, 6)
    other.load_state_dict(one.state_dict())
    with pytest.raises(pp.PruneError, match="does not run on another batch size"):
        prove_equal(one, other, x, 1e-5, fresh_inputs(x))
    found = prove_equal(other, one, x, 1e-5, fresh_inputs(x))
    assert found.differences.keys() == {"eval", "train", "other values"}
    assert found.skipped.keys() == {"another batch size", "another size of axis 1"}
    assert "does not run: RuntimeError: shape '[2, 6]' is" in found.skipped["another batch size"]


class Expects(nn.Module):
    """A model that refuses what `refuses` says, as a rewritten forward does."""

    def __init__(self, refuses: Callable[[Tensor], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.refuses = nn.Conv2d(3, 3, 1), refuses

    def forward(self, x: Tensor) -> Tensor:
        if self.refuses(x):
            raise OtherSizes("a picture of another size")
        out: Tensor = self.a(x)
        return out


def test_sizes_that_only_the_pruned_model_refuses_are_skipped_with_the_reason() -> None:
    x = torch.randn(2, 3, 8, 8)
    one, other = Expects(lambda x: False), Expects(lambda x: x.shape[-1] != 8)
    found = prove_equal(one, other, x, 1e-5, fresh_inputs(x))
    assert found.skipped.keys() == {"another picture size"}
    reason = found.skipped["another picture size"]
    assert reason == "the pruned model refuses these sizes: a picture of another size"


def test_other_values_have_to_run_in_the_pruned_model() -> None:
    x = torch.randn(2, 3, 8, 8)
    one, other = Expects(lambda x: False), Expects(lambda y: not torch.equal(x, y))
    with pytest.raises(pp.PruneError, match="does not run on other values"):
        prove_equal(one, other, x, 1e-5, fresh_inputs(x))


def test_any_other_error_of_the_pruned_model_is_an_error_of_the_proof() -> None:
    class Refuses(Expects):
        def forward(self, x: Tensor) -> Tensor:
            if self.refuses(x):
                raise pp.PruneError("no")
            return super().forward(x)

    x = torch.randn(2, 3, 8, 8)
    one, other = Expects(lambda x: False), Refuses(lambda x: x.shape[-1] != 8)
    with pytest.raises(pp.PruneError, match="does not run on another picture size: no"):
        prove_equal(one, other, x, 1e-5, fresh_inputs(x))


def test_outputs_whose_batch_size_follows_the_picture_are_skipped_with_the_reason() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, 64)

    x = torch.randn(2, 3, 8, 8)
    found = prove_equal(Flat(), Flat(), x, 1e-5, fresh_inputs(x))
    assert found.skipped == {
        "another picture size": "the outputs have another batch size than on the example"
    }


def test_a_run_says_which_modes_it_could_not_compare_and_why() -> None:
    class OnlyEval(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and not x.requires_grad:
                raise ValueError("needs targets")
            out: Tensor = super().forward(x)
            return out

    x = torch.randn(3, 6)
    model = OnlyEval(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    pruner = trained(model.eval(), x)
    assert pruner.skipped == {}
    pruner.export()
    assert pruner.skipped["train"] == "the gated model does not run: ValueError: needs targets"
    assert "train" not in pruner.proof and "eval" in pruner.proof
    report = pruner.report()
    line = "export() did not compare: train (the gated model does not run: ValueError: needs"
    assert line in str(report) and line in report.to_html()
    assert line in str(Report.from_json(report.to_json()))


def test_a_reason_is_one_short_line_and_names_the_type_of_error() -> None:
    assert reason_given(ValueError("no heads.\nmore")) == "ValueError: no heads"
    assert reason_given(pp.PruneError("give one. ")) == "give one"
    assert reason_given(KeyError()) == "KeyError"
    assert len(reason_given(ValueError("x" * 10_000))) < 400


def test_the_example_may_change_after_the_pruner_is_built() -> None:
    x = torch.randn(3, 6)
    model = Masked(0.0)
    pruner = pp.Pruner(model, {"x": x}, macs=0.5, steps=4)
    x.fill_(NAN)
    assert isinstance(pruner.example, dict) and bool(pruner.example["x"].isfinite().all())


# --- as users run them ----------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.embed, self.encode = nn.Linear(5, 16), nn.TransformerEncoder(layer, 2)
        self.head, self.masked = nn.Linear(16, 3), masked

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -2:] = True
        h = self.encode(self.embed(x), src_key_padding_mask=padding if self.masked else None)
        out: Tensor = self.head(h)
        return out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masked", [False, True])
def test_norms_in_torchs_encoders_are_weighted_under_no_grad_too(masked: bool) -> None:
    x = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    pruner = pp.Pruner(Encoder(masked), x, macs=0.5, steps=40, norms=True)
    optimizer, model = attached(pruner), pruner.model
    for step in range(40):
        optimizer.zero_grad()
        model.train()(x)[:, :-2].square().mean().backward()
        optimizer.step()
        if step % 13 == 0:  # half of the gates are half-way
            wanted = model.eval()(x).detach()
            with torch.no_grad():
                torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    small = pruner.export().eval()
    assert pruner.proof["no_grad"] < 1e-4
    with torch.no_grad():
        torch.testing.assert_close(small(x)[:, :-2], model.eval()(x)[:, :-2], rtol=1e-4, atol=1e-5)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small.modules())


def test_an_encoder_that_skips_its_gates_is_refused() -> None:
    """What the fused path computed before: norms without their weights."""
    x = torch.randn(2, 7, 5)
    gated, small = Encoder().eval(), Encoder().eval()
    gated.encode.layers[0].norm1.register_forward_hook(lambda *_: None)
    original = type(gated).forward

    def skips(self: Encoder, x: Tensor) -> Tensor:
        out = original(self, x)
        return out if torch.overrides._is_torch_function_mode_enabled() else out * 1.5

    gated.__class__ = type("Encoder", (Encoder,), {"forward": skips})
    with pytest.raises(pp.PruneError, match=r"under torch\.no_grad"):
        prove_cut(gated, small, x, lambda model, copied: copy.deepcopy(model))


def test_a_part_that_computes_in_float32_does_not_fail_a_float64_model() -> None:
    class Rms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = x.float()
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
            return self.weight * y.to(x.dtype)

    torch.manual_seed(0)
    body = [nn.Linear(6, 16), Rms(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4)]
    pruner = trained(
        nn.Sequential(*body).double(), torch.randn(4, 6, dtype=torch.float64), norms=True
    )
    pruner.export()
    assert max(pruner.proof.values()) <= 1e-10


def test_compact_is_proved_in_float64_where_float32_is_too_coarse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import polarprune.surgery.cut_proof as proof

    pruner = trained(Masked(0.0), X)
    real, tried = proof.prove_equal, []

    def coarse(one: nn.Module, *rest: Any) -> Any:
        tried.append(next(one.parameters()).dtype)
        if tried[-1] == torch.float32:
            raise pp.PruneError("rounded")
        return real(one, *rest)

    monkeypatch.setattr(proof, "prove_equal", coarse)
    pruner.compact()
    assert pruner.compactions == 1 and tried == [torch.float32, torch.float64]


# --- what a model keeps ---------------------------------------------------------------------------


class Remembers(nn.Module):
    """A layer that keeps what it computed in eval mode until it is trained again."""

    def __init__(self, empty: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.kept = nn.Linear(6, 16), nn.Linear(16, 4), empty

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            out: Tensor = self.b(self.a(x))
            return out
        if not self.kept:
            product, shift = self.b.weight @ self.a.weight, self.b(self.a.bias)
            if isinstance(self.kept, dict):
                self.kept["w"], self.kept["b"] = product, shift
            else:
                self.kept += [product, shift]
        weight, bias = self.kept.values() if isinstance(self.kept, dict) else self.kept
        return x @ weight.t() + bias


@pytest.mark.parametrize("empty", [{}, []])
def test_what_a_model_kept_in_eval_mode_is_not_exported(empty: Any) -> None:
    x = torch.randn(3, 6)
    model = Remembers(copy.copy(empty))
    pruner = pp.Pruner(model, x, macs=0.7, steps=20)
    optimizer = attached(pruner)
    for step in range(20):
        optimizer.zero_grad()
        model.train()(x).square().mean().backward()
        optimizer.step()
        if step == 3:
            model.eval()(x)  # kept: the weights of this step
    small = pruner.export()
    wanted = model.train()(x)
    assert len(model.kept) == 2 and not small.kept
    torch.testing.assert_close(small.eval()(x), wanted)


def test_hooks_of_parameters_that_the_small_model_lacks_are_told() -> None:
    model = Masked(0.0)
    model.a.weight.register_hook(lambda gradient: gradient * 0.5)
    graph = pp.trace(model, X)
    with pytest.warns(UserWarning, match=r"a\.weight .* has hooks on its gradient"):
        pp.shrink(model, graph, {"a": [0, 1]})
    pruner = trained(model, X)
    with pytest.warns(UserWarning, match="Register them there"):
        pruner.export()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(Masked(0.0), X).export()


def test_references_outside_the_parameters_lead_to_the_loaded_tensors(tmp_path: Path) -> None:
    class Tied(Masked):
        def __init__(self) -> None:
            super().__init__(0.0)
            self.tied = [self.a.weight]

        def forward(self, x: Tensor) -> Tensor:
            return self.b((x @ self.tied[0].t()).relu())

    small = trained(Tied(), X).export().eval()
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=Tied()).eval()
    assert loaded.tied[0] is loaded.a.weight
    assert torch.equal(loaded(X), small(X))


# --- the precision of the computation -------------------------------------------------------------


class Single(nn.Module):
    """A part computes in float32 in a way that cannot be intercepted, whatever the model is in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 48), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, weight = self.a(x).relu(), self.b.weight
        found: Tensor = h.type("torch.FloatTensor") @ weight.type("torch.FloatTensor").T
        return found


def test_a_part_in_float32_sets_the_limit_of_a_model_in_float64() -> None:
    pruner = trained(Single().double(), X.double(), steps=8)
    pruner.export()
    assert "eval, in float64" in pruner.proof and 1e-10 < max(pruner.proof.values()) <= 1e-6


def test_the_limit_stays_1e_minus_10_where_all_is_computed_in_float64() -> None:
    one = Masked(0.0).double()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.b.bias += 1e-7
    with pytest.raises(pp.PruneError, match="at most 1e-10 is allowed"):
        prove_cut(one, other, X.double(), lambda model, copied: copy.deepcopy(other))


def test_a_loss_hides_no_difference() -> None:
    """A mean differs by less than a part of it: only float64 tells it from rounding."""

    class Loss(Masked):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean() + 1.0

    one = Loss(0.0)
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.b.weight += 1e-6
    assert difference(one, other, X, training=False) < 1e-5
    with pytest.raises(pp.PruneError, match="differs"):
        prove_cut(one, other, X, lambda model, copied: copy.deepcopy(other).double())
    same = copy.deepcopy(one)
    found = prove_cut(one, same, X, lambda model, copied: copy.deepcopy(model))
    assert found.differences.keys() >= {"eval, in float64", "train, in float64"}


# --- low precision --------------------------------------------------------------------------------


def test_weights_are_widened_when_they_are_read_and_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).half()
    wide, x = copy.deepcopy(model).float(), X.half()
    with WidensOnReading(torch.float32), torch.no_grad():
        found = model(x)
        assert model[0].weight.dtype == torch.float32 and model[0].weight.shape == (16, 6)
        model[0].bias.zero_()
    assert torch.equal(found, wide(x.float()))
    assert model[0].weight.dtype == torch.float16 and not model[0].bias.any()


def test_a_model_of_low_precision_is_not_converted_for_its_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import polarprune.surgery.cut_proof as proof

    pruner = trained(Masked(0.0), X)
    pruner.model.half()
    real, compared = proof.prove_equal, []

    def noted(one: nn.Module, other: nn.Module, *rest: Any) -> Any:
        compared.append((one is pruner.model, {p.dtype for p in other.parameters()}))
        return real(one, other, *rest)

    monkeypatch.setattr(proof, "prove_equal", noted)
    small = pruner.export()
    assert compared == [(True, {torch.float32})]
    assert {p.dtype for p in small.parameters()} == {torch.float16}
    assert pruner.proof.keys() >= {"eval, in float32", "train, in float32"}
    assert max(pruner.proof.values()) <= 1e-5


def test_a_wrong_cut_of_low_precision_is_refused() -> None:
    one = Masked(0.0).half()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.b.bias += 1e-2

    def cut(model: nn.Module, copied: bool) -> nn.Module:
        return copy.deepcopy(other).to(next(model.parameters()).dtype)

    with pytest.raises(pp.PruneError, match="differs"):
        prove_cut(one, other, X.half(), cut)
