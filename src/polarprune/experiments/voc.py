"""Pascal VOC segmentation, whole, on the device where it is used; scales, crops and flips are drawn
there.

`voc:DIR` names a folder as it is handed out: JPEGImages, SegmentationClass and
ImageSets/Segmentation/{train,val}.txt, or one above it (VOC2012, VOCdevkit).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PruneError
from .recipes import Recipe
from .task import Shuffled, Task, evaluating

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "dining table", "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa",
    "train", "monitor",
)  # fmt: skip
VOID = -1  # in answers: not scored. Stored masks hold class + 1, and 0 for void
_SCALES = (0.5, 2.0)


@dataclass(frozen=True)
class Photos:
    """Photos at the upper left of squares (N × side × side × 3, bytes), their masks (class + 1, 0
    is void) and sizes (N × 2)."""

    x: Tensor
    masks: Tensor
    sizes: Tensor

    def to(self, device: str | torch.device) -> Photos:
        return Photos(*(tensor.to(device) for tensor in vars(self).values()))

    def pick(self, places: Tensor | slice) -> Photos:
        return Photos(*(tensor[places] for tensor in vars(self).values()))

    def __len__(self) -> int:
        return len(self.sizes)

    def normalised(self) -> Tensor:
        """As a model takes them: outside of a photo all is 0, the mean colour."""
        along = torch.arange(self.x.shape[1], device=self.x.device)
        rows, columns = (along < self.sizes[:, axis, None] for axis in (0, 1))
        inside = rows[:, :, None] & columns[:, None, :]
        colours = zip(self.x.unbind(3), MEAN, STD, strict=True)
        return torch.stack([(x / 255 - mean) / std * inside for x, mean, std in colours], 1)


@dataclass(frozen=True)
class Voc(Task):
    """Photos to learn from and photos to score on."""

    train: Photos
    test: Photos
    measure = "mIoU"

    def to(self, device: str | torch.device) -> Voc:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def held_out(self, count: int) -> Voc:
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(10))
        order = order.to(self.train.sizes.device)
        first, rest = order[:count], order[count:]
        return replace(self, train=self.train.pick(rest), test=self.train.pick(first))

    def stream(self, recipe: Recipe) -> Crops:
        return Crops(self.train, recipe.batch, recipe.crop)

    def example(self) -> Tensor:
        return self.test.pick(slice(self.examples)).normalised()

    def answers(self, model: nn.Module, batch: int = 8) -> Tensor:
        with evaluating(model):
            return torch.cat([
                model(self.test.pick(slice(k, k + batch)).normalised()).argmax(1).byte()
                for k in range(0, len(self.test), batch)
            ])  # fmt: skip

    def score(self, answers: Tensor) -> float:
        """Mean over the classes that occur, in a mask or an answer, of their intersection over
        union; void is left out."""
        by_class = intersections(answers, self.test.masks)
        return float(by_class[~by_class.isnan()].mean())

    def details(self, answers: Tensor) -> dict[str, Any]:
        by_class = zip(CLASSES, intersections(answers, self.test.masks).tolist(), strict=True)
        return {"IoU": {name: share for name, share in by_class if share == share}}

    def loss(self, model: nn.Module, batch: int = 8) -> float:
        sums = []
        with evaluating(model):
            for k in range(0, len(self.test), batch):
                some = self.test.pick(slice(k, k + batch))
                wanted = some.masks.long() - 1
                found = F.cross_entropy(model(some.normalised()), wanted, ignore_index=VOID)
                sums.append(float(found) * len(some))
        return sum(sums) / len(self.test)

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train), len(self.test)


def intersections(answers: Tensor, masks: Tensor) -> Tensor:
    """Intersection over union of every class; not a number where it does not occur."""
    count = len(CLASSES)
    seen = masks > 0
    pairs = (masks[seen].long() - 1) * count + answers[seen].long()
    table = torch.bincount(pairs, minlength=count * count).reshape(count, count).double()
    both = table.diagonal()
    return both / (table.sum(0) + table.sum(1) - both)


class Crops(Shuffled):
    """Squares cut out of photos that were made half to twice as large and perhaps turned over."""

    def __init__(self, photos: Photos, size: int, crop: int) -> None:
        super().__init__(len(photos), size, photos.x.device)
        self.photos, self.crop = photos, crop

    def next(self) -> tuple[Tensor, Tensor]:
        mine = self.photos.pick(self.pick())
        where = self._where(mine.sizes)
        x = F.grid_sample(mine.normalised(), where, mode="bilinear", align_corners=False)
        masks = mine.masks[:, None].float()
        y = F.grid_sample(masks, where, mode="nearest", align_corners=False)[:, 0]
        return x, y.long() - 1

    def _where(self, sizes: Tensor) -> Tensor:
        """For every pixel of the crops the place in the photo, as grid_sample counts: -1 … 1."""
        low, high = _SCALES
        chance = torch.rand(4, self.size, 1, device=self.device)
        scale = low + (high - low) * chance[0]
        along = torch.arange(self.crop, device=self.device) + 0.5
        back = torch.where(chance[1] < 0.5, along, self.crop - along)
        lines = []
        for axis, own in ((1, back), (0, along.expand_as(back))):
            free = sizes[:, axis, None] * scale - self.crop  # less than 0: void around the photo
            place = (free * chance[2 + axis] + own) / scale
            lines.append(2 * place / self.photos.x.shape[1] - 1)
        columns, rows = lines[0][:, None, :], lines[1][:, :, None]
        return torch.stack(torch.broadcast_tensors(columns, rows), -1)

    def loss(self, out: Tensor, target: Tensor, opinion: Tensor | None, recipe: Recipe) -> Tensor:
        loss = F.cross_entropy(out.float(), target, ignore_index=VOID)
        if opinion is None:
            return loss
        t = recipe.temperature
        said, wanted = F.log_softmax(out.float() / t, 1), F.log_softmax(opinion.float() / t, 1)
        apart = F.kl_div(said, wanted, reduction="none", log_target=True).sum(1).mean()
        return (1 - recipe.distill) * loss + recipe.distill * t * t * apart

    def right(self, out: Tensor, target: Tensor) -> Tensor:
        seen = target != VOID
        return ((out.argmax(1) == target) & seen).sum() / seen.sum().clamp_min(1)


def open_voc(folder: Path) -> Voc:
    root = next(
        (place for place in (folder, folder / "VOC2012", folder / "VOCdevkit" / "VOC2012")
         if (place / "SegmentationClass").is_dir()), None
    )  # fmt: skip
    if root is None:
        raise PruneError(
            f"--data voc:{folder}: there is no SegmentationClass in it. Give the folder that holds "
            f"JPEGImages, SegmentationClass and ImageSets, or VOC2012 or VOCdevkit above it."
        )
    parts = [_pairs(root, part) for part in ("train", "val")]
    longest = max(max(mask.shape) for pairs in parts for _, mask in pairs)
    side = 16 * ((longest + 14) // 16) + 1  # 513 for VOC: its photos are up to 500 long
    return Voc(*(_laid_out(pairs, side) for pairs in parts))


def _pairs(root: Path, part: str) -> list[tuple[Tensor, Tensor]]:
    """Photos and masks."""
    list_file = root / "ImageSets" / "Segmentation" / f"{part}.txt"
    try:
        names = list_file.read_text(encoding="utf-8").split()
    except OSError as error:
        raise PruneError(f"--data: {list_file} cannot be read: {error}.") from error
    found = []
    for name in names:
        photo = pixels(root / "JPEGImages" / f"{name}.jpg", lambda image: image.convert("RGB"))
        mask = pixels(root / "SegmentationClass" / f"{name}.png")
        if photo.shape[:2] != mask.shape:
            raise PruneError(
                f"--data: {name} is {tuple(photo.shape[:2])} pixels, its mask {tuple(mask.shape)}: "
                f"they have to be alike."
            )
        if int(mask[mask != 255].max()) >= len(CLASSES):
            raise PruneError(f"--data: the mask of {name} has a class above {len(CLASSES) - 1}.")
        found.append((photo, mask))
    return found


def _laid_out(pairs: list[tuple[Tensor, Tensor]], side: int) -> Photos:
    x = torch.zeros(len(pairs), side, side, 3, dtype=torch.uint8)
    masks = torch.zeros(len(pairs), side, side, dtype=torch.uint8)
    for k, (photo, mask) in enumerate(pairs):
        height, width = mask.shape
        x[k, :height, :width] = photo
        masks[k, :height, :width] = mask + 1  # 255, void, becomes 0
    return Photos(x, masks, torch.tensor([mask.shape for _, mask in pairs]))


def pixels(path: Path, change: Callable[[Any], Any] = lambda image: image) -> Tensor:
    """Of a picture, as Pillow reads it, or changes it."""
    try:
        import numpy
        from PIL import Image
    except ImportError as error:
        raise PruneError("photos are read with Pillow: pip install polarprune[vision]") from error
    try:
        with Image.open(path) as image:
            found: Any = numpy.array(change(image))
    except OSError as error:
        raise PruneError(f"--data: {path} cannot be read: {error}.") from error
    return torch.from_numpy(found)
