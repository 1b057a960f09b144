"""Without its framework an adapter says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

import polarprune as pp

NEEDED = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning", "lightning.pytorch", "pytorch_lightning"],
    "transformers": ["transformers"],
}


@pytest.mark.parametrize("extra", NEEDED)
def test_an_adapter_without_its_framework_says_what_to_install(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = f"polarprune.integrations.{extra}"
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    for name in NEEDED[extra]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(pp.PruneError, match=rf"pip install 'polarprune\[{extra}\]'"):
        importlib.import_module(adapter)
