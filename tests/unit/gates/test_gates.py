"""g_ε(α) = α² / (α² + ε), where the gates go, and what they are equal to."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import polarprune as pp
from polarprune.gates.gate import GatedWeight, gate_value
from polarprune.gates.install import install
from tests.helpers.nets import NETS, digits_resnet, mobilenetv2_small

EPSILONS = [0.1, 1e-3, 5e-8, 6e-11]
IMAGE, DIGIT = torch.randn(2, 3, 16, 16), torch.randn(2, 1, 8, 8)


def gate_with(alpha: Tensor, eps: float = 0.1) -> pp.Gate:
    gate = pp.Gate(len(alpha), dtype=alpha.dtype)
    with torch.no_grad():
        gate.alpha.copy_(alpha)
        gate.eps.fill_(eps)
    return gate


@pytest.mark.parametrize("eps", EPSILONS)
def test_the_slope_is_that_of_the_formula(eps: float) -> None:
    alpha = torch.linspace(-2, 2, 401, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(gate_value(alpha, eps).sum(), alpha)
    with torch.no_grad():
        wanted = 2 * alpha * eps / (alpha**2 + eps) ** 2
    assert torch.allclose(slope, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", EPSILONS)
def test_at_zero_value_and_slope_are_exactly_zero(eps: float, dtype: torch.dtype) -> None:
    gate = gate_with(torch.zeros(3, dtype=dtype), eps)
    gate.values().sum().backward()
    assert torch.equal(gate.values(), torch.zeros(3, dtype=dtype))
    assert torch.equal(gate.alpha.grad, torch.zeros(3, dtype=dtype))


def test_a_new_gate_is_one_over_one_point_one() -> None:
    assert torch.allclose(pp.Gate(4).values(), torch.full((4,), 1 / 1.1))
    assert float(gate_value(torch.tensor(1.0, dtype=torch.float64), 0.1)) == pytest.approx(1 / 1.1)


@pytest.mark.parametrize("eps", EPSILONS)
def test_gates_are_even_between_zero_and_one_and_grow_with_alpha(eps: float) -> None:
    alpha = torch.linspace(0, 3, 301, dtype=torch.float64)
    values = gate_value(alpha, eps)
    assert torch.equal(values, gate_value(-alpha, eps))
    assert bool(((values >= 0) & (values <= 1)).all())
    assert bool((values.diff() >= 0).all())


def test_smaller_eps_polarizes() -> None:
    alpha = torch.tensor([0.0, 1e-3, 0.1, 1.0], dtype=torch.float64)
    values = torch.stack([gate_value(alpha, eps) for eps in EPSILONS])
    assert bool((values.diff(dim=0)[:, 1:] > 0).all())
    assert values[-1, 1] > 0.99 and values[-1, 0] == 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(6, 4, 3, padding=1), (2, 6, 5, 5)),
        (nn.Conv1d(6, 4, 3, stride=2), (2, 6, 9)),
        (nn.Linear(6, 4), (3, 6)),
    ],
    ids=["conv2d", "conv1d", "linear"],
)
def test_a_gate_on_channels_equals_a_gate_on_the_weight(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    layer, x = layer.double(), torch.randn(shape, dtype=torch.float64)
    gate = gate_with(torch.tensor([1.0, 0.0, -0.4, 0.01, 2.0, 0.3], dtype=torch.float64))
    wanted = layer(gate(x))
    gated = copy.deepcopy(layer)
    parametrize.register_parametrization(gated, "weight", GatedWeight([gate], torch.arange(6), 1))
    assert torch.allclose(gated(x), wanted, rtol=1e-12, atol=1e-12)


def test_grouped_convolution_takes_the_gate_of_each_column_of_its_groups() -> None:
    layer, x = nn.Conv2d(8, 6, 3, groups=2).double(), torch.randn(2, 8, 5, 5, dtype=torch.float64)
    alpha = torch.tensor([0.0, 0.3, -1.0, 0.05], dtype=torch.float64)
    wanted = layer(gate_with(alpha.repeat(2))(x))
    weight = GatedWeight([gate_with(alpha)], torch.arange(4), 1)
    parametrize.register_parametrization(layer, "weight", weight)
    assert torch.allclose(layer(x), wanted, rtol=1e-12, atol=1e-12)


def test_an_axis_can_hold_channels_of_several_gates_and_of_none() -> None:
    layer, x = nn.Linear(6, 4).double(), torch.randn(3, 6, dtype=torch.float64)
    gates = [gate_with(torch.tensor([0.5, 0.0]).double()), gate_with(torch.tensor([0.2]).double())]
    first, second = gates[0].values(), gates[1].values()
    one = torch.ones(1, dtype=torch.float64)
    laid = torch.cat([second, one, first[1:], first[:1], one, second])
    wanted = layer(x * laid)
    weight = GatedWeight(gates, torch.tensor([2, -1, 1, 0, -1, 2]), 1)
    parametrize.register_parametrization(layer, "weight", weight)
    assert torch.allclose(layer(x), wanted, rtol=1e-12, atol=1e-12)


def open_gates(name: str) -> tuple[nn.Module, nn.Module, pp.trace, dict[str, pp.Gate], Tensor]:
    """Return a net in float64, its gated copy with random α, its graph, gates and example."""
    model, example = NETS[name]()
    graph = pp.trace(model, example)
    plain = model.double()
    gated = copy.deepcopy(plain)
    gates = install(gated, graph, (example[0].double(),))
    for gate in gates.values():
        nn.init.uniform_(gate.alpha, -1, 1)
        with torch.no_grad():
            gate.alpha[0] = 0
    return plain, gated, graph, gates, example[0].double()


@pytest.mark.parametrize(
    "name", ["conv_bn_relu", "residual_projection", "inception", "mlp", "flatten_view", "resnext"]
)
def test_installed_gates_equal_gates_on_the_incoming_channels(name: str) -> None:
    plain, gated, graph, gates, x = open_gates(name)
    values = torch.cat([g.values().detach() for g in gates.values()] + [torch.ones(1).double()])
    for tensor, axes in graph.sites.items():
        module = plain.get_submodule(tensor.rpartition(".")[0])
        for axis, units in axes.items():
            groups = getattr(module, "groups", 1)
            if axis == 0:  # whole groups of a grouped convolution: one unit for each group
                per_group = module.out_channels // groups
                incoming = values[units[::per_group]].repeat_interleave(
                    module.in_channels // groups
                )
            else:
                incoming = values[units].repeat(groups)

            def scale(module: nn.Module, args: tuple[Tensor], by: Tensor = incoming) -> Tensor:
                shape = [1] * args[0].dim()
                shape[-1 if isinstance(module, nn.Linear) else 1] = -1
                return args[0] * by.reshape(shape)

            module.register_forward_pre_hook(scale)
    assert torch.allclose(gated(x), plain(x), rtol=1e-10, atol=1e-10)


def test_a_closed_gate_gets_no_gradient_and_gives_none_to_its_weights() -> None:
    _, gated, _, gates, x = open_gates("conv_bn_relu")
    F.cross_entropy(gated(x), torch.zeros(len(x), dtype=torch.long)).backward()
    for gate in gates.values():
        assert float(gate.alpha.grad[0]) == 0
        assert bool((gate.alpha.grad[1:] != 0).any())
    reader = gated.get_submodule("1.0")
    gradient = reader.parametrizations.weight.original.grad
    assert bool((gradient[:, 0] == 0).all())
    assert bool((gradient[:, 1:] != 0).any())


def gated_modules(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if parametrize.is_parametrized(module)}


def test_gates_stand_before_every_merging_layer_and_before_no_depthwise_one() -> None:
    model = mobilenetv2_small().eval()
    install(model, pp.trace(model, IMAGE), IMAGE)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    depthwise = {n for n, m in layers.items() if getattr(m, "groups", 1) > 1}
    assert len(depthwise) == 8
    assert gated_modules(model) == set(layers) - depthwise - {"0.0"}  # 0.0 reads the image


def test_only_weights_are_gated_and_each_once() -> None:
    model = mobilenetv2_small().eval()
    install(model, pp.trace(model, IMAGE), IMAGE)
    for name in gated_modules(model):
        lists = model.get_submodule(name).parametrizations
        assert list(lists) == ["weight"]
        assert len(lists["weight"]) == 1


def test_residual_branches_share_one_gate() -> None:
    model = digits_resnet(width=8).eval()
    gates = install(model, pp.trace(model, DIGIT), DIGIT)

    def gate_of(name: str) -> pp.Gate:
        (gate,) = model.get_submodule(name).parametrizations.weight[0].gates
        return gate

    stream = [gate_of(name) for name in ("1.conv1", "2.conv1", "2.downsample.0")]
    assert all(gate is stream[0] for gate in stream)
    assert gate_of("3.conv1") is gate_of("4.2")
    inner = {id(gate_of(name)) for name in ("1.conv2", "2.conv2", "3.conv2")}
    assert len(inner) == 3
    assert len(gates) == len({id(gate) for gate in gates.values()}) == 5


def test_gates_add_one_alpha_for_each_channel_and_nothing_else() -> None:
    model = digits_resnet(width=8).eval()
    before = sum(p.numel() for p in model.parameters())
    graph = pp.trace(model, torch.randn(2, 1, 8, 8))
    install(model, graph, DIGIT)
    assert sum(p.numel() for p in model.parameters()) == before + graph.units


def test_gates_of_a_half_precision_model_are_kept_in_float32() -> None:
    model, example = NETS["mlp"]()
    graph = pp.trace(model, example)
    gates = install(model.bfloat16(), graph, (example[0].bfloat16(),))
    assert {gate.alpha.dtype for gate in gates.values()} == {torch.float32}
    assert model(example[0].bfloat16()).dtype == torch.bfloat16


def test_a_gate_can_be_placed_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), pp.Gate(6), nn.Linear(6, 2))
    gate = model[2]
    with torch.no_grad():
        gate.alpha[::2] = 0
    x = torch.randn(5, 4)
    hidden = torch.relu(model[0](x)) * gate.values()
    assert torch.equal(model(x), model[3](hidden))
    assert gate.values()[::2].tolist() == [0, 0, 0]


def test_a_gate_can_stand_on_any_axis() -> None:
    gate = gate_with(torch.tensor([0.0, 1.0]))
    x = torch.ones(2, 3, 2)
    last = pp.Gate(2, axis=-1)
    last.load_state_dict(gate.state_dict())
    assert last(x)[..., 0].abs().sum() == 0
    assert torch.allclose(last(x)[..., 1], torch.tensor(1 / 1.1))


# --- with a budget --------------------------------------------------------------------------------


def slopes_and_values(limits: dict[str, float]) -> tuple[pp.Pruner, Tensor, list[Tensor]]:
    torch.manual_seed(1)
    model = digits_resnet().double()
    pruner = pp.Pruner(model, torch.randn(2, 1, 8, 8).double(), steps=8, **limits)  # type: ignore[arg-type]
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(2)).double()
    out = model.eval()(x)
    out.square().sum().backward()
    return pruner, out.detach(), [gate.alpha.grad for gate in pruner.gates.values()]  # type: ignore[misc]


def test_with_a_budget_gates_give_the_same_values_and_gradients_as_without() -> None:
    _, plain_out, plain_slopes = slopes_and_values({"lam": 1.0})
    _, out, slopes = slopes_and_values({"macs": 0.5})
    assert torch.equal(out, plain_out)
    for mine, other in zip(slopes, plain_slopes, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_weights_learn_the_same_with_a_budget_and_without() -> None:
    found = []
    for limits in ({"lam": 1.0}, {"macs": 0.5}):
        pruner, _, _ = slopes_and_values(limits)
        mine = {id(gate.alpha) for gate in pruner.gates.values()}
        found.append([p.grad for p in pruner.model.parameters() if id(p) not in mine])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_model_has_no_gates_after_ctrl_c_during_their_installation(
    stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = NETS["resnet20"]()
    keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    graph, before = pp.trace(model, example), model.eval()(*example)

    def interrupted(*given: object) -> None:
        assert "parametrizations" in str(list(model.state_dict()))  # gates are in the model already
        raise stop

    monkeypatch.setattr("polarprune.gates.install._check", interrupted)
    with pytest.raises(stop):
        install(model, graph, example)
    assert list(model.state_dict()) == keys and torch.equal(model(*example), before)
    assert [type(module) for module in model.modules()] == kinds
