"""`save` and `load`: one safetensors file, a fresh instance, a new process, the same bits."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import polarprune as pp
from polarprune.files.untrusted.checksum import BLANK, signed
from tests.helpers.exact import traced
from tests.helpers.nets import NETS, cbr, digits_resnet, head
from tests.helpers.processes import environment

# What each net is here for.
pytestmark = pytest.mark.usefixtures("shared_traces")
ROUND_TRIPS = {
    "digits_resnet": "projection shortcuts",
    "residual_pad_lambda": "option A: the padding is rewritten",
    "residual_pad_cat_zeros": "a whole block is rewritten",
    "unet_interpolate": "the root itself is rewritten",
    "resnext": "grouped convolution",
    "conv_transpose_grouped": "grouped transposed convolution",
    "group_norm_no_affine": "a norm without tensors",
    "depthwise_separable": "depth-wise convolution",
    "flatten_view_baked": "flatten with a number",
    "split_unequal": "split with numbers",
    "aspp": "branches that close",
    "shared_conv": "one module used twice",
    "se_conv": "squeeze and excite",
    "conv_bias": "no norm",
    "keyword_inputs": "keyword arguments",
    "auxiliary_head": "an output in train mode only",
}


def call(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return tree_leaves(out)


def shrunk(name: str, width: str) -> tuple[nn.Module, Any]:
    """Return a model with half of every group, or without the groups that may close."""
    model, inputs = NETS[name]()
    graph = traced(name)
    generator = torch.Generator().manual_seed(1)
    plan = {}
    for group in graph.prunable.values():
        kept = torch.randperm(group.size, generator=generator)[: max(1, group.size // 2)]
        closes = width == "closed" and not group.minimum
        plan[group.name] = [] if closes else sorted(kept.tolist())
    return pp.shrink(model, graph, plan), inputs


def snapshot(model: nn.Module) -> tuple[str, dict[str, Tensor]]:
    return repr(model), {key: value.clone() for key, value in model.state_dict().items()}


def unchanged(model: nn.Module, before: tuple[str, dict[str, Tensor]]) -> bool:
    state = model.state_dict()
    return (
        repr(model) == before[0]
        and state.keys() == before[1].keys()
        and all(torch.equal(state[key], value) for key, value in before[1].items())
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "small.safetensors"
    pp.save(shrunk("digits_resnet", "half")[0], path)
    return path


def fresh() -> nn.Module:
    return NETS["digits_resnet"]()[0]


# --------------------------------------------------------------------------------------------------
# the way there and back

CHILD = """
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

import polarprune as pp
from tests.helpers.nets import NETS

torch.set_num_threads(int(sys.argv[2]))
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    name = path.name.split("-")[0]
    model = NETS[name]()[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    small = pp.load(path, model=model)
    inputs = load_file(path.with_suffix(".inputs"))
    given = inputs if not any(key.isdigit() for key in inputs) else None
    found = {}
    for mode in ("eval", "train"):
        small.train(mode == "train")
        with torch.no_grad():
            out = small(**given) if given else small(*(inputs[key] for key in sorted(inputs)))
        for k, tensor in enumerate(tree_leaves(out)):
            found[f"{mode} {k}"] = tensor.contiguous()
    found.update({f"state {key}": value for key, value in small.state_dict().items()})
    save_file(found, path.with_suffix(".found"))
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Return small models from this process, and what a new process loads from their files."""
    folder = tmp_path_factory.mktemp("new_process")
    small: dict[tuple[str, str], tuple[nn.Module, Any]] = {}
    for name in ROUND_TRIPS:
        for width in ("half", "closed"):
            model, inputs = small[name, width] = shrunk(name, width)
            path = folder / f"{name}-{width}.safetensors"
            pp.save(model, path)
            named = inputs if isinstance(inputs, dict) else dict(enumerate(inputs))
            save_file({str(key): x for key, x in named.items()}, path.with_suffix(".inputs"))
    (folder / "child.py").write_text(CHILD)
    subprocess.run(
        [sys.executable, "-W", "error", folder / "child.py", folder, str(torch.get_num_threads())],
        env=environment(),
        check=True,
        timeout=100,
    )

    def results(name: str, width: str) -> Any:
        return *small[name, width], load_file(folder / f"{name}-{width}.found")

    return results


@pytest.mark.parametrize("width", ["half", "closed"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_new_process_computes_the_same_bits(name: str, width: str, child: Any) -> None:
    small, inputs, found = child(name, width)
    small = copy.deepcopy(small)
    for mode in ("eval", "train"):
        out = call(small.train(mode == "train"), inputs)
        assert len(out) == sum(key.startswith(mode) for key in found)
        assert all(torch.equal(found[f"{mode} {k}"], tensor) for k, tensor in enumerate(out))
    state = {f"state {key}": value for key, value in small.state_dict().items()}
    assert state.keys() == {key for key in found if key.startswith("state")}
    assert all(torch.equal(found[key], value) for key, value in state.items())


@pytest.mark.parametrize("width", ["half", "closed"])
@pytest.mark.parametrize("name", ["digits_resnet", "residual_pad_lambda", "unet_interpolate"])
def test_loaded_model_has_the_same_structure(name: str, width: str, tmp_path: Path) -> None:
    small, _ = shrunk(name, width)
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=NETS[name]()[0])
    assert repr(loaded) == repr(small)
    assert list(loaded.state_dict()) == list(small.state_dict())


def test_exported_model_makes_the_round_trip(tmp_path: Path) -> None:
    model, inputs = NETS["residual_pad_lambda"]()
    pruner = pp.Pruner(model, inputs, macs=0.5, steps=2)
    pruner.step()
    pruner.step()
    small = pruner.export()
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=NETS["residual_pad_lambda"]()[0])
    assert torch.equal(*call(loaded.eval(), inputs), *call(small.eval(), inputs))


def test_model_trained_after_the_cut_keeps_its_training(saved: Path, tmp_path: Path) -> None:
    small, inputs = pp.load(saved, model=fresh()), NETS["digits_resnet"]()[1]
    optimizer = torch.optim.SGD(small.train().parameters(), lr=0.1)
    small(*inputs).square().sum().backward()
    optimizer.step()
    pp.save(small, tmp_path / "tuned.safetensors")
    tuned = pp.load(tmp_path / "tuned.safetensors", model=fresh())
    assert torch.equal(*call(tuned.eval(), inputs), *call(small.eval(), inputs))
    untuned = pp.load(saved, model=fresh())
    assert not torch.equal(*call(untuned.eval(), inputs), *call(small, inputs))


def test_loaded_model_can_be_saved_again(saved: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    pp.save(pp.load(saved, model=fresh()), again)
    assert again.read_bytes() == saved.read_bytes()


def test_tensors_that_two_names_share_are_stored_once(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = cbr(3, 8)
            self.one = self.two = cbr(8, 8)
            self.head = head(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.two(self.one(self.stem(x))))

    model, x = Shared().eval(), torch.randn(2, 3, 8, 8)
    small = pp.shrink(model, pp.trace(model, x), {"stem.0": [0, 5]})
    pp.save(small, tmp_path / "small.safetensors")
    names = load_file(tmp_path / "small.safetensors").keys()
    assert "one.0.weight" in names and "two.0.weight" not in names
    loaded = pp.load(tmp_path / "small.safetensors", model=Shared()).eval()
    assert loaded.one is loaded.two
    assert torch.equal(loaded(x), small(x))


def test_path_may_be_text(tmp_path: Path) -> None:
    small, inputs = shrunk("conv_bias", "half")
    path = str(tmp_path / "small.safetensors")
    pp.save(small, path)
    loaded = pp.load(path, model=NETS["conv_bias"]()[0])
    assert torch.equal(*call(loaded, inputs), *call(small, inputs))


# --------------------------------------------------------------------------------------------------
# the file


def test_file_has_the_permissions_of_any_new_file(saved: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    assert saved.stat().st_mode == plain.stat().st_mode


def test_what_was_there_stays_if_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError("no space left")

    model, _ = shrunk("digits_resnet", "half")
    path = tmp_path / "small.safetensors"
    path.write_bytes(b"the one before")
    monkeypatch.setattr("polarprune.files.writing.save_file", full)
    with pytest.raises(pp.PruneError, match="no space left"):
        pp.save(model, path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"the one before"


def test_file_is_safetensors_with_json_and_nothing_else(saved: Path) -> None:
    data = saved.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    content = json.loads(header.pop("__metadata__")["polarprune"])
    assert content["version"] == 3
    assert {"shapes", "slices", "attributes"} <= content["recipe"].keys()
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert 8 + length + ends[-1][1] == len(data)
    small = pp.load(saved, model=fresh())
    assert header.keys() == small.state_dict().keys()


def test_nothing_is_pickled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small, _ = shrunk("residual_pad_lambda", "closed")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    pp.save(small, tmp_path / "small.safetensors")
    loaded = pp.load(tmp_path / "small.safetensors", model=NETS["residual_pad_lambda"]()[0])
    assert repr(loaded) == repr(small)


def test_saving_does_not_change_the_model(tmp_path: Path) -> None:
    small, _ = shrunk("residual_pad_lambda", "closed")
    before = snapshot(small)
    pp.save(small, tmp_path / "small.safetensors")
    assert unchanged(small, before)


# --------------------------------------------------------------------------------------------------
# what is refused, with the model unchanged


def refused(path: Path, model: nn.Module, wording: str) -> None:
    before = snapshot(model)
    with pytest.raises(pp.PruneError) as error:
        pp.load(path, model=model)
    assert wording in str(error.value)
    assert unchanged(model, before)


def test_plain_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(pp.PruneError, match=r"Sequential was not made by export\(\) or shrink\(\)"):
        pp.save(fresh(), tmp_path / "plain.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_missing_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "gone.safetensors", fresh(), "load: there is no file")


def test_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, fresh(), "load: there is no file")


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", b"\x80\x04K\x01.", bytes(200), b"\xff" * 64],
    ids=["empty", "text", "pickle", "zeros", "huge header"],
)
def test_garbage_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "garbage.safetensors"
    path.write_bytes(content)
    refused(path, fresh(), "is not a safetensors file")


def test_cut_off_file_is_refused(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    path.write_bytes(saved.read_bytes()[:-100])
    refused(path, fresh(), "is not a safetensors file")


def test_file_without_a_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    save_file(fresh().state_dict(), path)
    refused(path, fresh(), "holds no recipe; it was not written by polarprune.save")


def rewritten(saved: Path, path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Write the file with other metadata and the matching checksum."""
    data = saved.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    content = json.loads(header["__metadata__"]["polarprune"])
    changed = change(content)
    text = changed if isinstance(changed, str) else json.dumps({**content, "sha256": BLANK})
    tensors = load_file(saved)
    save_file(tensors, path, metadata={"polarprune": signed(text, tensors)})
    return path


def test_file_of_a_newer_version_is_refused(saved: Path, tmp_path: Path) -> None:
    path = rewritten(saved, tmp_path / "new.safetensors", lambda c: c.update(version=99))
    refused(path, fresh(), "was written by a newer version of polarprune; update")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "not json",
        lambda content: content.pop("recipe") and None,
        lambda content: content["recipe"].update(surprise=1),
    ],
    ids=["no json", "no recipe inside", "unknown field"],
)
def test_damaged_recipe_is_refused(change: Any, saved: Path, tmp_path: Path) -> None:
    path = rewritten(saved, tmp_path / "bad.safetensors", change)
    refused(path, fresh(), str(path))


def test_narrower_model_is_refused(saved: Path) -> None:
    refused(saved, digits_resnet(width=4), "expected shape [8, 1, 3, 3], found [4, 1, 3, 3]")


def test_other_model_is_refused(saved: Path) -> None:
    refused(saved, NETS["mlp"]()[0], "The recipe belongs to another model")


def test_model_with_another_number_of_classes_is_refused(saved: Path) -> None:
    refused(saved, digits_resnet(width=8, num_classes=7), "expected shape [10, 16], found [7, 16]")


def test_model_that_is_small_already_is_refused(saved: Path) -> None:
    refused(saved, pp.load(saved, model=fresh()), "give a fresh instance of the class")


def test_gated_model_is_refused(saved: Path) -> None:
    model, inputs = NETS["digits_resnet"]()
    pp.Pruner(model, inputs, lam=1.0, steps=1)
    refused(saved, model, "give a fresh instance of the class")


class Deeper(nn.Sequential):
    """What was pruned, and one more layer that the recipe does not touch."""

    def __init__(self) -> None:
        super().__init__(*digits_resnet(width=8), nn.Linear(10, 10))


def test_model_with_a_layer_too_many_is_refused(saved: Path) -> None:
    refused(saved, Deeper().eval(), "does not fit this model: missing ['5.weight', '5.bias']")


def test_model_whose_whole_layers_differ_is_refused(tmp_path: Path) -> None:
    """Layers that were not cut are not in the recipe; their shapes have to fit all the same."""

    def make(kernel: int) -> nn.Module:
        first = nn.Conv2d(3, 8, kernel, padding=kernel // 2)
        return nn.Sequential(first, nn.ReLU(), cbr(8, 12), head(12)).eval()

    model, x = make(3), torch.randn(2, 3, 8, 8)
    graph = pp.trace(model, x, keep=["0"])
    assert set(graph.prunable) == {"2.0"}
    pp.save(pp.shrink(model, graph, {"2.0": [0, 3]}), tmp_path / "small.safetensors")
    refused(tmp_path / "small.safetensors", make(5), "does not fit this model")


def test_precision_is_that_of_the_file(tmp_path: Path) -> None:
    model, (x,) = NETS["digits_resnet"]()
    graph = pp.trace(model.double(), x.double())
    small = pp.shrink(model, graph, {n: [*range(g.size)][::2] for n, g in graph.prunable.items()})
    pp.save(small, tmp_path / "small.safetensors")
    again = pp.load(tmp_path / "small.safetensors", model=NETS["digits_resnet"]()[0])
    assert {p.dtype for p in again.parameters()} == {torch.float64}
    assert torch.equal(again.eval()(x.double()), small.eval()(x.double()))
