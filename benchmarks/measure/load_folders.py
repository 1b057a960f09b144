"""Load folders of pruned models in a process that cannot import polarprune, and compare them.

A folder `name` is compared with what `name.pt` holds: the Auto class to load it with, an example,
and the logits and the generated text of the pruned model.

    python -m benchmarks.measure.load_folders FOLDER    # prints the differences as JSON
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.import_torchvision import import_torchvision

TOKENS = 8


def logits_of(out: Any) -> torch.Tensor:
    """Return what a model of transformers computes."""
    found: torch.Tensor = out["logits"] if "logits" in out else out["logits_per_image"]
    return found


def generated(model: Any, example: dict[str, Any], *, use_cache: bool) -> Any:
    """Return the text that a model generates, as numbers; None if it generates none."""
    if not model.can_generate():
        return None
    given = {key: value for key, value in example.items() if not key.startswith("decoder_")}
    options = {"max_new_tokens": TOKENS, "do_sample": False, "use_cache": use_cache}
    return model.generate(**given, **options).tolist()


def store_answers(model: Any, example: dict[str, Any], auto: str, file: Path) -> None:
    """Store what a pruned model computes; its folder has the name of the file without `.pt`."""
    with torch.no_grad():
        logits = logits_of(model(**example))
    text = generated(model, example, use_cache=False)
    torch.save({"auto": auto, "example": example, "logits": logits, "text": text}, file)


def load_elsewhere(folder: Path) -> dict[str, dict[str, Any]]:
    """Load the folders in another process; return the difference and whether texts are equal."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.measure.load_folders", str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(folder: Path) -> dict[str, dict[str, Any]]:
    """Load the folders in this process."""
    import transformers

    found = {}
    for file in sorted(folder.glob("*.pt")):
        wanted = torch.load(file)
        model = getattr(transformers, wanted["auto"]).from_pretrained(file.with_suffix("")).eval()
        with torch.no_grad():
            logits = logits_of(model(**wanted["example"]))
        texts = [generated(model, wanted["example"], use_cache=cached) for cached in (False, True)]
        found[file.stem] = {
            "class": type(model).__name__,
            "difference": float((logits - wanted["logits"]).abs().max()),
            "same_text": None if wanted["text"] is None else texts == [wanted["text"]] * 2,
        }
    return found


if __name__ == "__main__":
    sys.modules["polarprune"] = None  # type: ignore[assignment]  # an import of it fails
    import_torchvision()
    print(json.dumps(compare(Path(sys.argv[1]))))
