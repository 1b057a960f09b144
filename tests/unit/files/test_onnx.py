"""An export converts to ONNX like any other model, and onnxruntime computes the same."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import polarprune as pp
from tests.helpers import attention_nets, fixed_sizes, norm_nets
from tests.helpers.exact import VARIANTS, set_gates
from tests.helpers.nets import NETS

pytestmark = pytest.mark.usefixtures("shared_traces")

Made = tuple[nn.Module, Tensor]


def net(name: str) -> Made:
    model, (x,) = NETS[name]()
    return model.double(), x.double()


def attention(name: str) -> Made:
    torch.manual_seed(0)
    block = attention_nets.Block(attention_nets.MAKERS[name]())
    model = nn.Sequential(nn.Linear(6, attention_nets.DIM), block, nn.Linear(attention_nets.DIM, 5))
    return model.double(), torch.randn(2, 7, 6).double()


# The model, and the modules that come back with other code than the user's.
CASES: dict[str, tuple[Callable[[], Made], set[str]]] = {
    "plain convolutions": (lambda: net("digits_resnet"), set()),
    "baked-in padding": (lambda: fixed_sizes.made("pad"), {"1"}),
    "baked-in slices": (lambda: fixed_sizes.made("slices"), {"1"}),
    "windowed attention": (lambda: fixed_sizes.made("windows"), {"attention"}),
    "heads that follow a number": (lambda: fixed_sizes.made("gpt2"), set()),
    "packed attention": (lambda: attention("packed"), {"1.attention"}),
    "attention of torch": (lambda: attention("torch"), {"1.attention.attention"}),
    "attention of torch, weights": (
        lambda: attention("torch with weights"),
        {"1.attention.attention"},
    ),
    "layer norm of a cut stream": (lambda: norm_nets.made("layer norm"), {"blocks.0", "blocks.1"}),
}


def cut(model: nn.Module, x: Tensor, variant: str) -> nn.Module:
    pruner = pp.Pruner(model, x, lam=1.0, steps=1, norms=True)
    set_gates(pruner, VARIANTS[variant], variant)
    for gate in pruner.gates.values():
        gate.eps.fill_(0.05)  # above one half, where norms have plain statistics
    return pruner.export()


# torch's own exporter still uses a name that torch gave up.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("variant", ["half", "closed"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_onnxruntime_gives_what_torch_gives(name: str, variant: str) -> None:
    """Compare on the batch of the example and on another one, in float32."""
    make, other_code = CASES[name]
    model, x = make()
    families = {path: type(module) for path, module in model.named_modules()}
    small = cut(model, x, variant).float().eval()
    found = {path for path, module in small.named_modules() if type(module) is not families[path]}
    assert found >= other_code if variant == "closed" else found == other_code
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(small, (x.float(),), dynamic_shapes=({0: batch},), verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    for inputs in (x.float(), torch.randn(5, *x.shape[1:])):
        expected = small(inputs)
        (there,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        assert expected.std(0).max() > 1e-3  # it depends on the input
        torch.testing.assert_close(torch.from_numpy(there), expected, rtol=1e-4, atol=1e-5)
