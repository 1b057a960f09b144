"""A small decoder with a cache, in the forms in which models return one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeysAndValues:
    """A layer's cache, with keys and values as attributes, as in transformers."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values


class Cache:
    """Stands for `transformers.cache_utils.Cache`: it has that class's name and module."""

    def __init__(self, layer: KeysAndValues) -> None:
        self.layers = [layer]


Cache.__module__ = "transformers.cache_utils"


class Attention(nn.Module):
    """Attention with four heads; the options are ways in which code may read widths."""

    def __init__(self, counts_heads: bool, hard_coded: bool, asks: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.heads, self.scale_of_cache = 4, 1.0
        self.counts_heads, self.hard_coded, self.asks = counts_heads, hard_coded, asks

    def forward(self, x: Tensor, held: KeysAndValues, mask: Tensor | None) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, 6).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        past = held.keys
        if self.asks and past is not None and past.numel() == 0:
            raise RuntimeError("an empty cache")
        if past is not None:
            assert held.keys is not None
            held.keys = held.keys * self.scale_of_cache
            if self.counts_heads:
                k = k.reshape(len(x), self.heads, -1, 6)
            if self.hard_coded:
                with torch.enable_grad():  # which no graph holds
                    k = k.reshape(len(x), 4, -1, 6)
        k, v = held.update(k, v)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and past is None)
        found: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return found


class Decoder(nn.Module):
    """A decoder with one attention layer and an MLP of two layers.

    Args:
        form: in what form the cache is returned.
        options: those of `Attention`.
    """

    def __init__(
        self, form: str, *, counts_heads: bool = False, hard_coded: bool = False, asks: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.tokens, self.places = nn.Embedding(9, 24), nn.Embedding(16, 24)
        self.attention = Attention(counts_heads, hard_coded, asks)
        self.mlp = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 24))
        self.head = nn.Linear(24, 9)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
    ) -> Any:
        held = KeysAndValues()
        if past_key_values is not None and self.form != "unread":
            held = _held(past_key_values)
        start = 0 if held.keys is None else held.keys.shape[2]
        if position_ids is None:
            position_ids = torch.arange(start, start + input_ids.shape[1])
        x = self.tokens(input_ids) + self.places(position_ids)
        x = x + self.attention(x, held, _mask(attention_mask, input_ids.shape[1]))
        logits = self.head(x + self.mlp(x))
        return _out(self.form, logits, held)


def _held(given: Any) -> KeysAndValues:
    if isinstance(given, Cache):
        return given.layers[0]
    held = KeysAndValues()
    held.keys, held.values = given
    return held


def _mask(given: Tensor | None, length: int) -> Tensor | None:
    """Return a mask with axes of queries and keys; one of two axes says what is padding."""
    if given is None or given.dim() == 4:
        return given
    whole = given.shape[1]
    causal = torch.ones(length, whole).tril(whole - length).bool()
    return causal & given.bool()[:, None, None]


def _out(form: str, logits: Tensor, held: KeysAndValues) -> Any:
    pair = (held.keys, held.values)
    forms: dict[str, Any] = {
        "none": {"logits": logits},
        "class": {"logits": logits, "past_key_values": Cache(held)},
        "class in a tuple": (logits, Cache(held)),
        "tuples": {"logits": logits, "past_key_values": pair},
        "another name": {"logits": logits, "state": pair},
        "tuples in a tuple": (logits, pair),
        "unread": {"logits": logits, "past_key_values": pair},
        "two caches": {"logits": logits, "a": Cache(held), "b": Cache(held)},
    }
    return forms[form]
