"""The code of docs/transformers.md runs as it stands, and its table has the stored numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.pages.transformers_page import MARKS, TITLES, summary, table
from benchmarks.store import read_numbers

TEXT = (Path(__file__).parents[3] / "docs" / "transformers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class Tokenizer:
    """A replacement for a tokenizer, which would need a vocabulary."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.filterwarnings("ignore")  # advice about padding
def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 256, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=50, num_hidden_layers=2, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained("large")
    words = torch.randint(3, 50, (6, 2, 8))
    scope: dict[str, Any] = {
        "epochs": 2,
        "loader": [{"input_ids": batch} for batch in words],
        "tokenizer": Tokenizer(),
    }
    for block in BLOCKS:
        exec(block, scope)
    pruner, loaded = scope["pruner"], scope["small"]
    assert sorted(file.name for file in Path("small").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert loaded.config.use_cache and loaded.config.intermediate_size < 256
    assert pruner.cost()["params"] <= 0.5 * pruner.graph.cost.original()["params"]
    assert sum(p.numel() for p in loaded.parameters()) == pruner.cost()["params"]


def test_the_table_is_that_of_the_stored_numbers() -> None:
    content = read_numbers("transformers_folders")
    written = TEXT.partition(MARKS[0])[2].partition(MARKS[1])[0].strip()
    assert written == "\n".join([*table(content["families"]), "", summary(content)])
    assert content["families"].keys() == TITLES.keys()
