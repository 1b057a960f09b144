"""Pascal VOC segmentation: photos in the memory of the device, which draws scales, crops and flips.

`voc:DIR` names the unpacked folder with JPEGImages, SegmentationClass and
ImageSets/Segmentation/{train,val}.txt, or a folder above it (VOC2012, VOCdevkit).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import PruneError
from ..settings import Settings
from .distillation import mixed, teacher_distance
from .photos import MEAN, STD, read_photo
from .task import InMemoryStream, Task, evaluating, held_out_order

CLASSES = (
    "background",
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "dining table",
    "dog",
    "horse",
    "motorbike",
    "person",
    "potted plant",
    "sheep",
    "sofa",
    "train",
    "monitor",
)
VOID = -1  # target of pixels that are not scored; stored masks hold class + 1, and 0 for void
_SCALES = (0.5, 2.0)


@dataclass(frozen=True)
class Photos:
    """Photos (N × side × side × 3, bytes), masks (class + 1, 0 is void) and sizes (N × 2).

    Each photo lies at the upper left of a square of zeros.
    """

    x: Tensor
    masks: Tensor
    sizes: Tensor

    def to(self, device: str | torch.device) -> Photos:
        return Photos(*(tensor.to(device) for tensor in vars(self).values()))

    def pick(self, indices: Tensor | slice) -> Photos:
        return Photos(*(tensor[indices] for tensor in vars(self).values()))

    def __len__(self) -> int:
        return len(self.sizes)

    def normalised(self) -> Tensor:
        """Return the inputs of a model; pixels outside of a photo are 0, the mean colour."""
        along = torch.arange(self.x.shape[1], device=self.x.device)
        rows, columns = (along < self.sizes[:, axis, None] for axis in (0, 1))
        inside = rows[:, :, None] & columns[:, None, :]
        colours = zip(self.x.unbind(3), MEAN, STD, strict=True)
        return torch.stack([(x / 255 - mean) / std * inside for x, mean, std in colours], 1)


@dataclass(frozen=True)
class Voc(Task):
    """Training photos and test photos with their masks."""

    train: Photos
    test: Photos
    measure = "mIoU"

    def to(self, device: str | torch.device) -> Voc:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def held_out(self, count: int) -> Voc:
        order = held_out_order(len(self.train)).to(self.train.sizes.device)
        first, rest = order[:count], order[count:]
        return replace(self, train=self.train.pick(rest), test=self.train.pick(first))

    def stream(self, settings: Settings) -> Crops:
        return Crops(self.train, settings.batch, settings.crop)

    def example(self) -> Tensor:
        return self.test.pick(slice(self.examples)).normalised()

    def answers(self, model: nn.Module, batch: int = 8) -> Tensor:
        """Return the predicted class of every pixel."""
        parts = [self.test.pick(slice(k, k + batch)) for k in range(0, len(self.test), batch)]
        with evaluating(model):
            return torch.cat([model(part.normalised()).argmax(1).byte() for part in parts])

    def score(self, answers: Tensor) -> float:
        """Return the mean intersection over union of the classes in a mask or a prediction.

        Void pixels are left out.
        """
        by_class = intersection_over_union(answers, self.test.masks)
        return float(by_class[~by_class.isnan()].mean())

    def details(self, answers: Tensor) -> dict[str, object]:
        by_class = intersection_over_union(answers, self.test.masks).tolist()
        named = zip(CLASSES, by_class, strict=True)
        return {"IoU": {name: share for name, share in named if share == share}}  # without NaN

    def loss(self, model: nn.Module, batch: int = 8) -> float:
        sums = []
        with evaluating(model):
            for k in range(0, len(self.test), batch):
                part = self.test.pick(slice(k, k + batch))
                target = part.masks.long() - 1
                loss = F.cross_entropy(model(part.normalised()), target, ignore_index=VOID)
                sums.append(float(loss) * len(part))
        return sum(sums) / len(self.test)

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.train), len(self.test)


def intersection_over_union(answers: Tensor, masks: Tensor) -> Tensor:
    """Return the intersection over union of every class; NaN for a class that does not occur."""
    count = len(CLASSES)
    seen = masks > 0
    pairs = (masks[seen].long() - 1) * count + answers[seen].long()
    table = torch.bincount(pairs, minlength=count * count).reshape(count, count).double()
    both = table.diagonal()
    return both / (table.sum(0) + table.sum(1) - both)


class Crops(InMemoryStream):
    """Square crops of photos that are scaled by 0.5 to 2 and flipped or not."""

    def __init__(self, photos: Photos, size: int, crop: int) -> None:
        super().__init__(len(photos), size, photos.x.device)
        self.photos, self.crop = photos, crop

    def next(self) -> tuple[Tensor, Tensor]:
        photos = self.photos.pick(self.next_indices())
        grid = self._grid(photos.sizes)
        x = F.grid_sample(photos.normalised(), grid, mode="bilinear", align_corners=False)
        masks = photos.masks[:, None].float()
        y = F.grid_sample(masks, grid, mode="nearest", align_corners=False)[:, 0]
        return x, y.long() - 1

    def _grid(self, sizes: Tensor) -> Tensor:
        """Draw the position in the photo of every pixel of the crops, from -1 to 1."""
        low, high = _SCALES
        draws = torch.rand(4, self.size, 1, device=self.device)  # scale, flip, row, column
        scale = low + (high - low) * draws[0]
        along = torch.arange(self.crop, device=self.device) + 0.5
        flipped = torch.where(draws[1] < 0.5, along, self.crop - along)
        lines = []
        for axis, own in ((1, flipped), (0, along.expand_as(flipped))):
            free = sizes[:, axis, None] * scale - self.crop  # negative: void around the photo
            position = (free * draws[2 + axis] + own) / scale
            lines.append(2 * position / self.photos.x.shape[1] - 1)
        columns, rows = lines[0][:, None, :], lines[1][:, :, None]
        return torch.stack(torch.broadcast_tensors(columns, rows), -1)

    def loss(
        self, output: Tensor, target: Tensor, teacher: Tensor | None, settings: Settings
    ) -> Tensor:
        loss = F.cross_entropy(output.float(), target, ignore_index=VOID)
        if teacher is None:
            return loss
        by_class = teacher_distance(output, teacher, settings.temperature, "none")
        return mixed(loss, by_class.sum(1).mean(), settings)

    def accuracy(self, output: Tensor, target: Tensor) -> Tensor:
        seen = target != VOID
        return ((output.argmax(1) == target) & seen).sum() / seen.sum().clamp_min(1)


def open_voc(folder: Path) -> Voc:
    """Read the photos and masks of the training and the validation list."""
    root = _root(folder)
    parts = [_photos_and_masks(root, part) for part in ("train", "val")]
    longest = max(max(mask.shape) for pairs in parts for _, mask in pairs)
    side = 16 * ((longest + 14) // 16) + 1  # 513 for VOC, whose photos have sides of up to 500
    return Voc(*(_stacked(pairs, side) for pairs in parts))


def _root(folder: Path) -> Path:
    """Return the folder that holds SegmentationClass: the one given, or one inside of it."""
    for root in (folder, folder / "VOC2012", folder / "VOCdevkit" / "VOC2012"):
        if (root / "SegmentationClass").is_dir():
            return root
    raise PruneError(
        f"--data voc:{folder}: it has no folder SegmentationClass. Give the folder that holds "
        f"JPEGImages, SegmentationClass and ImageSets, or VOC2012 or VOCdevkit above it."
    )


def _photos_and_masks(root: Path, part: str) -> list[tuple[Tensor, Tensor]]:
    list_file = root / "ImageSets" / "Segmentation" / f"{part}.txt"
    try:
        names = list_file.read_text(encoding="utf-8").split()
    except OSError as error:
        raise PruneError(f"--data: cannot read {list_file}: {error}.") from error
    return [_photo_and_mask(root, name) for name in names]


def _photo_and_mask(root: Path, name: str) -> tuple[Tensor, Tensor]:
    photo = read_photo(root / "JPEGImages" / f"{name}.jpg", lambda image: image.convert("RGB"))
    mask = read_photo(root / "SegmentationClass" / f"{name}.png")
    if photo.shape[:2] != mask.shape:
        raise PruneError(
            f"--data: photo {name} has {tuple(photo.shape[:2])} pixels, its mask "
            f"{tuple(mask.shape)}. Both must have the same size."
        )
    if int(mask[mask != 255].max()) >= len(CLASSES):
        raise PruneError(f"--data: the mask of {name} has a class above {len(CLASSES) - 1}.")
    return photo, mask


def _stacked(pairs: list[tuple[Tensor, Tensor]], side: int) -> Photos:
    """Put photos and masks into tensors of the same size, at the upper left."""
    x = torch.zeros(len(pairs), side, side, 3, dtype=torch.uint8)
    masks = torch.zeros(len(pairs), side, side, dtype=torch.uint8)
    for k, (photo, mask) in enumerate(pairs):
        height, width = mask.shape
        x[k, :height, :width] = photo
        masks[k, :height, :width] = mask + 1  # 255, void, overflows to 0
    return Photos(x, masks, torch.tensor([mask.shape for _, mask in pairs]))
