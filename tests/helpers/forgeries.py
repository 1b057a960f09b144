"""Files for `attack`: small networks, cut and saved, and what an attacker turns them into."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn

import polarprune as pp
from polarprune.files.untrusted.checksum import BLANK, signed

# --- the networks ---------------------------------------------------------------------------------


class Baked(nn.Module):
    """A network with hard-coded widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.tail = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.stem(x).split([4, 4], 1)
        both = torch.cat([one.relu(), two.sigmoid()], dim=1)
        rows = both.reshape(x.shape[0], 8, -1).softmax(-1).view(x.shape[0], 8, *x.shape[2:])
        found: Tensor = self.tail(F.pad(rows, (0, 0, 0, 0, 2, 2)))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.two, self.last = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.two(F.relu(self.norm(self.one(x)))))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(5, 8), nn.MultiheadAttention(8, 4, batch_first=True)
        self.norm, self.tail = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        found: Tensor = self.tail(self.attention(x, x, x)[0])
        return found


class Tied(nn.Module):
    """Embedding and output share their weight, which a list contains, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.hidden, self.back = nn.Linear(8, 12), nn.Linear(12, 8)
        self.out.weight = self.embed.weight
        self.tied = [self.hidden.weight]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.back(F.gelu(self.hidden(self.embed(x)))))
        return found


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def blocks() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        Block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 2),
    )


def standardized() -> nn.Module:
    return nn.Sequential(Standardized(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 2, 1))


IMAGE = (2, 3, 6, 6)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any]]] = {
    "rewritten code": (Baked, lambda: torch.randn(IMAGE), {}),
    "a block without its branch": (blocks, lambda: torch.randn(IMAGE), {"1.one": []}),
    "fewer heads": (Attends, lambda: torch.randn(2, 4, 5), {}),
    "an embedding, tied": (Tied, lambda: torch.arange(8).reshape(2, 4), {}),
    "a computed weight": (standardized, lambda: torch.randn(IMAGE), {}),
}


@dataclass
class Victim:
    """A valid file, and the model that it leads to."""

    name: str
    make: Callable[[], nn.Module]
    x: Tensor
    wanted: Tensor
    data: bytes
    content: dict[str, Any]
    tensors: dict[str, Tensor]

    def signed(self, text: str) -> bytes:
        """Return the file with other metadata and the matching checksum."""
        text = text.replace(self.content.get("sha256", BLANK), BLANK, 1)
        return save(self.tensors, {"polarprune": signed(text, self.tensors)})


def victim(name: str, folder: Path) -> Victim:
    make, inputs, plan = NETWORKS[name]
    torch.manual_seed(0)
    model, x, file = make().eval(), inputs(), folder / "good.safetensors"
    graph = pp.trace(model, x)
    some = {group: list(range(0, one.size, 2)) for group, one in graph.prunable.items()}
    small = pp.shrink(model, graph, {**some, **plan}).eval()
    pp.save(small, file, card={"about": name})
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    content = json.loads(header["__metadata__"]["polarprune"])
    with torch.no_grad():
        return Victim(name, make, x, small(x), data, content, load_file(file))


def of_version_1(new: Victim) -> Victim:
    """Return the block without its branch as a file of version 1, which has no checksum."""
    content = copy.deepcopy(new.content)
    recipe = content["recipe"]
    del recipe["rewired"]["1"], recipe["removed"], content["sha256"]
    recipe["vanished"] = {"1": [{"node": "two", "vector": True}, {"node": "last", "spread": True}]}
    content["version"] = 1
    data = save(new.tensors, {"polarprune": json.dumps(content)})
    return replace(new, name="a file of version 1", content=content, data=data)


LEAF = '{"type": null, "context": null, "children_spec": []}'
ONE_ARGUMENT = (
    '[1, {"type": "builtins.tuple", "context": "null", "children_spec": [{"type": '
    f'"builtins.tuple", "context": "null", "children_spec": [{LEAF}]}}, {{"type": "builtins.dict", '
    '"context": "[]", "children_spec": []}]}]'
)  # the form of a call with one argument, as files of version 2 hold it


def of_version_2(new: Victim) -> Victim:
    """Return a file whose code takes one argument as a file of version 2, without source lines."""
    content = copy.deepcopy(new.content)
    content["version"] = 2
    for code in content["recipe"]["rewired"].values():
        assert code["form"] == ["tuple", [], [["tuple", [], ["*"]], ["dict", [], []]]]
        code["form"] = ONE_ARGUMENT
        for mode in ("train", "eval"):
            code[mode] = [item[:5] for item in code[mode]]
    data = new.signed(json.dumps(content))
    return replace(new, name="a file of version 2", content=content, data=data)


# --- damaged: bytes -------------------------------------------------------------------------------


def damaged(data: bytes, dice: random.Random) -> bytes:
    start = dice.randrange(len(data))
    length = min(dice.choice([1, 1, 1, 4, 30, 400]), len(data) - start)
    noise = dice.randbytes(length)
    end = start + length
    return dice.choice(
        [
            lambda: (
                data[:start] + bytes([data[start] ^ 1 << dice.randrange(8)]) + data[start + 1 :]
            ),
            lambda: data[:start] + noise + data[end:],
            lambda: data[:start] + data[end:],
            lambda: data[:start] + noise + data[start:],
            lambda: data[:start] + data[start:end] * 2 + data[end:],
            lambda: data[:start],
            lambda: data + noise,
            lambda: data[:start] + data[start:end][::-1] + data[end:],
            lambda: _other_header(data, dice),
        ]
    )()


def _other_header(data: bytes, dice: random.Random) -> bytes:
    """Return the file with a changed entry in the header of safetensors, which keeps its length."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = dice.choice([key for key in header if key != "__metadata__"])
    field = dice.choice(["dtype", "shape", "data_offsets"])
    header[name][field] = dice.choice(
        [
            "F64",
            "I32",
            "BF16",
            [],
            [1],
            [2**40, 2**40],
            [0, 10**18],
            header[name]["shape"][::-1],
            None,
        ]
    )
    if dice.random() < 0.3:
        header["__metadata__"] = {"polarprune": dice.choice(["", "{}"])}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


# --- forged: the recipe ---------------------------------------------------------------------------

STRANGE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**30,
    1.5,
    -0.0,
    1e300,
    "",
    "0",
    "weight",
    "__class__",
    "_\uff3finit_\uff3f",
    "\u202e",
    "\x00",
    "a" * 5000,
    [],
    {},
    [[]],
    {"": {}},
    [0, 0, 0],
    [-1],
    [True],
    [10**12],
    list(range(3000)),
    {"node": "x0"},
    {"dtype": "load"},
    {"device": "cuda:0; rm"},
]


def forged(content: dict[str, Any], dice: random.Random) -> str:
    content = copy.deepcopy(content)
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        if content:
            _edit(*_some_place(content, dice), dice)
    text = json.dumps(content)
    way = dice.random()
    if way < 0.03:
        return text.replace("{", '{"version": 3, ', 1)
    if way < 0.06:
        return text.replace(
            str(dice.choice("0123456789")), dice.choice(["NaN", "1e999", "Infinity"]), 1
        )
    if way < 0.09:
        deep = dice.choice([100, 1000, 10**5])
        return text.replace('"card": {', '"card": {"deep": ' + "[" * deep + "]" * deep + ", ", 1)
    return text


def _some_place(tree: Any, dice: random.Random) -> tuple[Any, Any]:
    """Return a random container in the tree, and one of its keys."""
    holder, key = tree, None
    while isinstance(holder, (dict, list)) and holder:
        key = dice.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if not isinstance(holder[key], (dict, list)) or dice.random() < 0.15:
            return holder, key
        tree, holder = holder, holder[key]
    return tree, key


def _edit(holder: Any, key: Any, dice: random.Random) -> None:
    old = holder[key]
    way = dice.randrange(7)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(old))
    elif way == 2 and isinstance(holder, dict):
        holder[dice.choice(["new", "_\uff3fclass_\uff3f", f"{key}x", key.upper()])] = holder.pop(
            key
        )
    elif way == 3 and type(old) is int:
        holder[key] = old + dice.choice([-1, 1, 7, 1000, 10**12])
    elif way == 4:
        other = dice.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], old
    elif way == 5:
        holder[key] = dice.choice([[old], {"tuple": [old]}, {"": old}])
    else:
        holder[key] = copy.deepcopy(dice.choice(STRANGE))


# --- hostile: stored code -------------------------------------------------------------------------

X = {"node": "x"}
METHODS = """
numpy apply_ map_ map2_ register_hook register_post_accumulate_grad_hook set_ storage
untyped_storage data_ptr const_data_ptr share_memory_ requires_grad_ to_mkldnn module_load
backward retain_grad resize_ as_strided as_subclass record_stream pin_memory __class__
__reduce_ex__ __getattribute__ __init__ __call__ __setattr__ __dlpack__ __array__ _make_subclass
new_empty_strided new is_shared storage_type eval exec _\uff3finit_\uff3f __setitem__ tofile
dump read open
"""

FUNCTIONS = """
os.system os.popen subprocess.run subprocess.Popen builtins.eval builtins.exec builtins.open
builtins.__import__ builtins.compile builtins.setattr builtins.delattr builtins.vars
builtins.globals operator.call operator.attrgetter operator.methodcaller operator.delitem
operator.itemgetter torch.load torch.save torch.from_file torch.hub.load torch.ops.load_library
torch.classes torch.jit.load torch.compile torch.vmap torch.set_default_device torch.manual_seed
torch.as_strided torch.from_numpy torch.frombuffer torch.from_dlpack
torch.utils.cpp_extension.load F.triplet_margin_with_distance_loss torch.lobpcg torch.autocast
torch._C._jit_set_profiling_mode torch.__init__ Tensor.numpy Tensor.apply_ Tensor.map_
Tensor.__class__ nn.__loader__ F.torch.load ctypes.CDLL _ctypes.dlopen sys.settrace
"""

ATTRIBUTES = """
__class__ __dict__ __globals__ __func__ __self__ ctypes _ctypes _os os system grad_fn grad
storage numpy register_hook _backward_hooks _\uff3fclass_\uff3f __init__ _cdata data_ptr
__builtins__ f_globals
"""

PATHS = """
__init__.__globals__ _\uff3finit_\uff3f._\uff3fglobals_\uff3f _modules _parameters forward
forward.__func__ __class__ training register_forward_hook _forward_hooks polarprune_recipe
0.__class__ dump_patches nowhere nowhere.weight weight.data. .weight ..
"""


def node(name: str, kind: str, target: str, args: list[Any], **kwargs: Any) -> list[Any]:
    return [name, kind, target, {"tuple": args}, {"dict": kwargs}]


def hostile_nodes(dice: random.Random, path: str) -> list[list[Any]]:
    """Nodes that no file may contain; `x` stands for a tensor of the graph."""
    read, function = "builtins.getattr", dice.choice(FUNCTIONS.split())
    method, name = dice.choice(METHODS.split()), dice.choice(ATTRIBUTES.split())
    call = {"node": "h0"}
    huge = dice.choice([10**9, 10**12, 2**62])
    chains = [
        [node("h0", "call_method", method, [X])],
        [node("h0", "call_method", method, [X, X])],
        [node("h0", "call_function", function, [dice.choice([X, "id", "6 * 7"])])],
        [node("h0", "call_function", read, [X, name])],
        [node("h0", "get_attr", dice.choice(PATHS.split()), [])],
        [node("h0", "call_module", dice.choice(PATHS.split()), [X])],
        [node("h0", dice.choice(["root", "exec", "", "call", "placeholder "]), "x", [])],
        [
            node("h0", "call_method", "detach", [X]),
            node("h1", "call_method", "numpy", [call]),
            node("h2", "call_function", read, [{"node": "h1"}, "ctypes"]),
            node("h3", "call_function", read, [{"node": "h2"}, "_ctypes"]),
            node("h4", "call_function", read, [{"node": "h3"}, "_os"]),
            node("h5", "call_method", "system", [{"node": "h4"}, "true"]),
        ],
        [
            node("h0", "get_attr", "_modules", []),
            node("h1", "call_function", "operator.setitem", [call, "evil", X]),
            node("h2", "call_module", "evil", ["true"]),
        ],
        [
            node(
                dice.choice(["h\nimport os", "__h", "h(", "_\uff3fh_\uff3f", "h;", "", "\uff48"]),
                "call_method",
                "relu",
                [X],
            )
        ],
        [node("h0", "call_function", "torch.zeros", [huge])],
        [node("h0", "call_function", "torch.full", [{"tuple": [2**20, 2**20]}, 1.0])],
        [node("h0", "call_function", "torch.arange", [huge])],
        [node("h0", "call_method", "repeat", [X, huge, 1, 1, 1])],
        [node("h0", "call_method", "expand", [X, huge, -1, -1, -1])],
        [node("h0", "call_function", "F.pad", [X, {"tuple": [huge, huge]}])],
        [node("h0", "call_method", "to", [X, {"device": dice.choice(["meta:", "cu;", "fpga"])}])],
        [node("h0", "call_method", "to", [X, {dice.choice(["dtype", "layout"]): "load"}])],
        [node("h0", "call_method", "add", [X, X], out=X)],
        [node("h0", "call_method", "add", [X, X], **{dice.choice(["__class__", "a b", "_x"]): 1})],
        [node("h0", "call_method", "add", [X, {dice.choice(["code", "lambda", "pickle"]): "x"}])],
        [node("h0", "call_method", "add", [X, 2**70])],
        [node("h0", "call_method", "add", [X, {"node": "nowhere"}])],
        [node("h0", "call_method", "relu", [path])],
    ]
    return dice.choice(chains)


def hostile(content: dict[str, Any], dice: random.Random) -> str:
    """Return the stored code with hostile nodes inserted, in one mode or in both."""
    content = copy.deepcopy(content)
    rewired = content["recipe"]["rewired"]
    path = dice.choice(list(rewired))
    added = hostile_nodes(dice, path)
    modes = dice.choice([("train",), ("eval",), ("train", "eval")])
    for mode in modes:
        nodes = rewired[path][mode]
        source = next(item[0] for item in nodes if item[1] == "placeholder")
        text = json.dumps(added).replace('{"node": "x"}', json.dumps({"node": source}))
        first = next(k for k, item in enumerate(nodes) if item[1] != "placeholder")
        at = dice.randrange(first, len(nodes))
        nodes[at:at] = json.loads(text)
    return json.dumps(content)


def mangled(content: dict[str, Any], dice: random.Random) -> str:
    """Return the stored code with nodes changed, removed or reordered."""
    content = copy.deepcopy(content)
    rewired = content["recipe"]["rewired"]
    code = rewired[dice.choice(list(rewired))]
    nodes = code[dice.choice(["train", "eval"])]
    k = dice.randrange(len(nodes))
    way = dice.randrange(6)
    if way == 0:
        del nodes[k]
    elif way == 1:
        nodes.insert(dice.randrange(len(nodes)), copy.deepcopy(nodes[k]))
    elif way == 2:
        dice.shuffle(nodes)
    elif way == 3:
        nodes[k][dice.randrange(3)] = nodes[dice.randrange(len(nodes))][dice.randrange(3)]
    elif way == 4:
        nodes[k][dice.choice([3, 4])] = copy.deepcopy(nodes[dice.randrange(len(nodes))][3])
    else:
        _edit(*_some_place(nodes[k], dice), dice)
    return json.dumps(content)
