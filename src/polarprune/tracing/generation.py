"""Separate a transformer's key-value cache from its output, and run one more token with it.

A transformer that generates text returns the keys and values of its attention, so that the next
call need not compute them again. Users do not read this cache, so its channels can be removed. They
do read what is generated with it: the run on an example is followed by a call with one more token
and the cache, and its output counts like any other output. All runs that record or compare a model
go through `answers`. Only this module knows what a cache is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import PruneError
from .model_state import Example, Kwargs, as_call, tensors_in

_CACHE = "past_key_values"
_CACHE_CLASS = ("transformers.cache_utils", "Cache")
_DECODER_TOKENS = "decoder_input_ids"
# Inputs of the first call that the next one must not get, because its tokens differ.
_ONLY_FIRST = ("labels", "input_ids", _DECODER_TOKENS, "inputs_embeds", "decoder_inputs_embeds")


class CannotContinue(PruneError):
    """The model does not run on one more token with the cache that it returned."""


def is_cache(held: object) -> bool:
    """Return True for a `Cache` of transformers, which need not be installed."""
    return any((base.__module__, base.__name__) == _CACHE_CLASS for base in type(held).__mro__)


@dataclass(frozen=True)
class Answer:
    """The tensors that a user reads of an output, and those of one more token."""

    read: list[Tensor]
    further: list[Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((*self.read, *self.further))


@dataclass(frozen=True)
class Split:
    """An output: the tensors that a user reads, and the cache, under the name of its argument."""

    read: list[Tensor]
    name: str = ""
    cache: object = None


@dataclass(frozen=True)
class FurtherCall:
    """The arguments of a call with one more token, apart from the cache, or why there are none."""

    arguments: Kwargs = field(default_factory=dict)
    refusal: str = ""


def split(out: object) -> Split:
    """Separate the cache in an output from the rest.

    A cache is an object of the class of transformers, or what a dict holds as `past_key_values`
    (tuples of tensors, before that class existed). Anything else is an output, and so are two
    caches.
    """
    items: Iterable[tuple[str, object]] = ()
    if isinstance(out, Mapping):
        items = out.items()
    elif isinstance(out, (tuple, list)):
        items = [(_CACHE, item) for item in out if is_cache(item)]
    found = [(str(key), held) for key, held in items if is_cache(held) or _is_legacy(key, held)]
    if len({id(held) for _, held in found}) != 1:
        return Split(tensors_in(out))
    name, cache = found[0]
    if isinstance(out, Mapping):
        out = {key: held for key, held in out.items() if held is not cache}
    return Split(tensors_in(out, without=cache), name, cache)


def _is_legacy(key: object, held: object) -> bool:
    return key == _CACHE and isinstance(held, (tuple, list)) and bool(tensors_in(held))


def answers(
    model: nn.Module,
    example: Example,
    *,
    generates: bool,
    further: FurtherCall | None = None,
    between: Callable[[object], None] = lambda cache: None,
) -> Answer:
    """Run the model and return the tensors of its output that a user reads.

    Args:
        model: The model, in the mode to run.
        example: What it is called with.
        generates: If the model returns a cache, leave it out. In eval mode, also run one more token
            with it and add the tensors of that output. If False, a cache is an output.
        further: What `further_call` returns, if the caller has it.
        between: Called with the cache before the further token runs.

    Raises:
        CannotContinue: The further token cannot be run.
    """
    args, kwargs = as_call(example)
    if not generates:
        return Answer(tensors_in(model(*args, **kwargs)), [])
    parts = split(model(*args, **kwargs))
    if parts.cache is None or model.training:
        return Answer(parts.read, [])
    call = further_call(model, example) if further is None else further
    if call.refusal:
        raise CannotContinue(call.refusal)
    between(parts.cache)
    try:
        more = model(**call.arguments, **{parts.name: parts.cache})
    except Exception as error:
        raise CannotContinue(str(error)) from error
    return Answer(parts.read, split(more).read)


def further_call(model: nn.Module, example: Example) -> FurtherCall:
    """Return the arguments of a call with one more token, or why there are none."""
    try:
        return _further_call(model, example)
    except Exception as error:  # arguments of these names mean something else in this model
        return FurtherCall(
            refusal=f"the arguments of a call with one more token cannot be made from the example "
            f"({type(error).__name__}: {error})"
        )


def _further_call(model: nn.Module, example: Example) -> FurtherCall:
    given = _by_name(model, example)
    decoder = "decoder_" if _DECODER_TOKENS in inspect.signature(model.forward).parameters else ""
    name, tokens = _token(given, decoder)
    if given.get(_CACHE) is not None:
        return FurtherCall(refusal=f"the example holds a cache itself, as {_CACHE}")
    if tokens is None:
        return FurtherCall(refusal="its inputs have no tokens under a name that is known")
    kept = {key: held for key, held in given.items() if key not in _ONLY_FIRST}
    if decoder:  # the encoder gets its inputs again
        kept |= {key: given[key] for key in ("input_ids", "inputs_embeds") if key in given}
    for key, lengthen in _LENGTHEN.items():
        key = decoder + key if key != "cache_position" else key
        held = kept.get(key)
        if isinstance(held, Tensor):
            kept[key] = lengthen(held)
    return FurtherCall({**kept, name: tokens})


def _by_name(model: nn.Module, example: Example) -> Kwargs:
    """Return the arguments of the call by name; empty if they have none."""
    args, kwargs = as_call(example)
    signature = inspect.signature(model.forward)
    found = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL and found.pop(parameter.name, ()):
            return {}
        if parameter.kind is parameter.VAR_KEYWORD:
            found.update(found.pop(parameter.name, {}))
    return found


def _token(given: Mapping[str, object], decoder: str) -> tuple[str, Tensor | None]:
    """Return one more token, taken from the given ones, and the name of its argument."""
    ids, embedded = f"{decoder}input_ids", f"{decoder}inputs_embeds"
    for name, source in ((ids, ids), (embedded, embedded), (ids, "labels"), (ids, "input_ids")):
        held = given.get(source)
        if isinstance(held, Tensor) and held.dim() >= 2 and held.shape[1]:
            token = held[:, :1].detach().clone()
            return name, token.clamp_min(0) if source == "labels" else token
    return "", None


def _next_mask(mask: Tensor) -> Tensor:
    """Return an attention mask for one more token, which attends to all that the last token did.

    A mask with an axis of queries keeps its last row. A mask that is added gets a zero, not a one.
    """
    added = mask.dim() > 2 and mask.is_floating_point()
    last = mask[..., -1:, :] if mask.dim() > 2 else mask
    own = torch.zeros_like if added else torch.ones_like
    return torch.cat([last, own(last[..., :1])], -1)


# Keyed by the end of the argument's name. All other arguments stay as they are.
_LENGTHEN: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_mask": _next_mask,
    "position_ids": lambda x: x[..., -1:] + 1,
    "cache_position": lambda x: x[-1:] + 1,
    "token_type_ids": lambda x: x[..., -1:],
}
