"""Draws what pruned networks predict: masks of DeepLabV3+ and photos in a style.

Photos of Pascal VOC may not be redistributed, so the stored figure has masks only; --photos adds
the photos. The stylised photos are those that come with scikit-learn.

    python -m benchmarks.pages.example_images style-data --photos DIR --features FILE --out DIR
    python -m benchmarks.pages.example_images masks --data voc:DIR --runs runs/experiments
    python -m benchmarks.pages.example_images paintings --data style:DIR --runs runs/experiments
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.measure.experiments import VOC
from benchmarks.store import FIGURES, ROOT
from polarprune.experiments.data.style import Features, as_input, read_square
from polarprune.experiments.data.table import open_data
from polarprune.experiments.data.task import evaluating
from polarprune.experiments.data.voc import CLASSES, Voc
from polarprune.experiments.networks.table import NETWORKS
from polarprune.experiments.runs.pruned_file import rebuild

OUT = FIGURES
TEST_PHOTOS = 20  # photos that are not trained on
FEATURE_MEAN = 0.12  # of scaled features: with more, the style hides the content


def palette(count: int) -> Any:
    """Return VOC's colours: the bits of a class number, spread over red, green and blue."""
    colours = numpy.zeros((count, 3), numpy.uint8)
    for k in range(count):
        for bit in range(8):
            for channel in range(3):
                colours[k, channel] |= ((k >> (3 * bit + channel)) & 1) << (7 - bit)
    return colours


def coloured(mask: Tensor) -> Any:
    """Return a mask (class + 1, 0 is void) as an image."""
    colours = numpy.concatenate([[[255, 255, 255]], palette(len(CLASSES))])
    return colours[mask.cpu().numpy()].astype(numpy.uint8)


def sheet(columns: dict[str, Sequence[Any]], path: Path, height: float = 1.7) -> None:
    """Draw images side by side, one column for each name, as wide as its first image."""
    rows = max(len(pictures) for pictures in columns.values())
    wide = [height * first.shape[1] / first.shape[0] for first, *_ in columns.values()]
    size = (sum(wide) + 0.1 * len(wide), rows * (height + 0.05) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, len(columns), squeeze=False, width_ratios=wide)
    for axis in axes.flat:
        axis.set_axis_off()
    for column, (name, pictures) in enumerate(columns.items()):
        axes[0][column].set_title(name, fontsize=10)
        for row, picture in enumerate(pictures):
            axes[row][column].imshow(picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# --- masks ----------------------------------------------------------------------------------------


def masks(given: argparse.Namespace) -> None:
    task = open_data(given.data)
    assert isinstance(task, Voc)
    task = Voc(task.train, task.test.pick(torch.tensor(chosen(task, given.rows)))).to(given.device)
    models = {"baseline": baseline("deeplabv3plus", given.runs / f"voc-{VOC[0]}")}
    for percent in VOC:
        models[f"{percent} %"], _ = rebuild(given.runs / f"voc-{percent}" / "small.safetensors")
    sizes = task.test.sizes.tolist()
    columns: dict[str, list[Any]] = {}
    if given.photos:
        columns["photo"] = [
            x[:h, :w].cpu().numpy() for x, (h, w) in zip(task.test.x, sizes, strict=True)
        ]
    found = {"by hand": task.test.masks}
    found |= {name: task.answers(model.to(given.device)) + 1 for name, model in models.items()}
    for name, answers in found.items():
        columns[name] = [
            coloured(mask[:h, :w]) for mask, (h, w) in zip(answers, sizes, strict=True)
        ]
    sheet(columns, given.out / "masks.png")


def chosen(task: Voc, rows: int) -> list[int]:
    """Return the indices of photos with one large animal each, one for every class."""
    found: dict[int, int] = {}
    for k, mask in enumerate(task.test.masks):
        counts = torch.bincount(mask.flatten().long(), minlength=len(CLASSES) + 1)[2:]
        kind = int(counts.argmax())
        large = float(counts[kind]) > 0.15 * float(task.test.sizes[k].prod())
        if int((counts > 0).sum()) == 1 and large and kind not in found:
            found[kind] = k
    return list(found.values())[:rows]


def baseline(network: str, run: Path) -> nn.Module:
    """Return the baseline of a run."""
    model = NETWORKS[network]()
    model.load_state_dict(load_file(str(run / "baseline.safetensors")))
    return model


# --- paintings ------------------------------------------------------------------------------------


def paintings(given: argparse.Namespace) -> None:
    from sklearn.datasets import load_sample_images

    folder = Path(given.data.partition(":")[2])
    small, card = rebuild(given.runs / "style-48" / "small.safetensors")
    models = {
        "baseline": baseline("stylenet", given.runs / "style-48"),
        f"{card['macs_share']:.1%} of its MACs": small,
    }
    photos = [image[:424, :640] for image in load_sample_images().images]
    columns: dict[str, list[Any]] = {"photo": list(photos)}
    for name, model in models.items():
        columns[name] = [painted(model, photo) for photo in photos]
    with Image.open(folder / "style.jpg") as style:
        columns["style"] = [numpy.array(style)]
    sheet(columns, given.out / "paintings.png")


def painted(model: nn.Module, photo: Any) -> Any:
    x = torch.from_numpy(photo.copy()).permute(2, 0, 1)[None].float()
    with evaluating(model):
        y = model(x)[0].clamp(0, 255)
    return y.permute(1, 2, 0).byte().numpy()


def style_data(given: argparse.Namespace) -> None:
    """Make a folder for `style:DIR`: photos, a drawn style, and features."""
    found = sorted(Path(given.photos).rglob("*.jpg"))
    for part, files in (("val", found[:TEST_PHOTOS]), ("train", found[TEST_PHOTOS:])):
        (given.out / part).mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, given.out / part / file.name)
    Image.fromarray(stained_glass()).save(given.out / "style.jpg", quality=95)
    features = Features(load_file(given.features))  # no more than is looked at
    if given.scaled:
        some = [read_square(file) for file in found[:TEST_PHOTOS]]
        scale(features, as_input(torch.stack(some)))
    save_file(features.state_dict(), str(given.out / "features.safetensors"))


def scale(features: Features, photos: Tensor) -> None:
    """Scale the features of every level to a mean of FEATURE_MEAN.

    The weights of the two losses are meant for a VGG-16 trained on ImageNet, and the features of
    other networks have other sizes.
    """
    with torch.no_grad():
        for level, end in enumerate(features.ends):
            size = features(photos)[level].mean() / FEATURE_MEAN
            last: Any = features.features[end - 2]  # before the ReLU
            last.weight /= size
            last.bias /= size
            if end + 1 < len(features.features):
                following: Any = features.features[end + 1]  # after the pooling
                following.weight *= size


def stained_glass(side: int = 512, panes: int = 160, seed: int = 0) -> Any:
    """Return an image of glass panes in five colours, brighter at the centre, with lead between."""
    generator = numpy.random.default_rng(seed)
    centres = generator.uniform(0, side, (panes, 2))
    colours = numpy.array(
        [[214, 40, 40], [247, 127, 0], [252, 191, 73], [0, 48, 130], [0, 120, 110]]
    )
    rows, columns = numpy.mgrid[:side, :side]
    apart = numpy.hypot(rows[..., None] - centres[:, 0], columns[..., None] - centres[:, 1])
    nearest = numpy.sort(apart, axis=-1)[..., :2]
    picture = colours[generator.integers(0, len(colours), panes)][apart.argmin(-1)]
    light = 1.15 - 0.012 * nearest[..., :1] + generator.normal(0, 0.05, (side, side, 1))
    lead = (nearest[..., 1] - nearest[..., 0] < 5)[..., None]
    return (picture * light * ~lead + 20 * lead).clip(0, 255).astype(numpy.uint8)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("masks", "paintings", "style-data"))
    parser.add_argument("--data", help="voc:DIR or style:DIR")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "experiments")
    parser.add_argument("--photos", nargs="?", const=True, help="of style-data: their folder")
    parser.add_argument("--features", help="weights of a VGG-16")
    parser.add_argument("--scaled", action="store_true", help="features that are not ImageNet's")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    {"masks": masks, "paintings": paintings, "style-data": style_data}[given.what](given)


if __name__ == "__main__":
    main()
