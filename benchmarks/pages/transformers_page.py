"""Writes the table of docs/transformers.md from the stored numbers of `transformers_folders`.

python -m benchmarks.pages.transformers_page
"""

from typing import Any

from benchmarks.store import DOCS, read_numbers

PAGE = DOCS / "transformers.md"
MARKS = ("<!-- families -->", "<!-- end of families -->")
TITLES = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "distilbert": "DistilBERT",
    "gpt2": "GPT-2",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "t5": "T5",
    "bart": "BART",
    "whisper": "Whisper",
    "vit": "ViT",
    "deit": "DeiT",
    "clip": "CLIP",
}
VARIANTS = {
    "mlp": "MLP",
    "heads": "heads",
    "stream": "stream",
    "all": "all in proportion",
    "settings": "`folder_settings`",
    "settings_norms": "with `norms=True`",
}
TOLERANCE = 1e-5


def cell(family: dict[str, Any], variant: str) -> str:
    """Return whether the config tells what was pruned; a letter stands for the reason."""
    if variant not in family["variants"]:
        return "frozen"
    row = family["variants"][variant]
    if "refused" in row:
        return "no (b)" if "outputs differ" in row["refused"] else "no (a)"
    assert row["difference"] <= TOLERANCE and row["same_text"] in (None, True)
    return f"yes, {row['params']:.0%}"


def table(families: dict[str, Any]) -> list[str]:
    heads = ["family", *VARIANTS.values()]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, family in families.items():
        cells = [TITLES[name], *(cell(family, variant) for variant in VARIANTS)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(content: dict[str, Any]) -> str:
    rows = [row for one in content["families"].values() for row in one["variants"].values()]
    loaded = [row for row in rows if "difference" in row]
    texts = [row for row in loaded if row["same_text"]]
    worst = max(row["difference"] for row in loaded)
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return (
        f"{len(loaded)} folders were loaded in a process that cannot import polarprune, with an "
        f"Auto class: the largest difference of logits is {worst:.1g}, and all {len(texts)} that "
        f"generate text generate the same, with and without a cache. {len(rows) - len(loaded)} "
        f"were refused. Small models with random weights; {content['machine']}, {versions}; by "
        f"[transformers_folders.py](../benchmarks/measure/transformers_folders.py)."
    )


def main() -> None:
    content, page = read_numbers("transformers_folders"), PAGE.read_text(encoding="utf-8")
    start, end = (page.index(mark) for mark in MARKS)
    lines = [MARKS[0], *table(content["families"]), "", summary(content), ""]
    PAGE.write_text(page[:start] + "\n".join(lines) + page[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
