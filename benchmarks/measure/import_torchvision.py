"""Imports torchvision, with operators in plain PyTorch if its compiled ones cannot be loaded."""

import sys
from typing import Any

import numpy as np


def import_torchvision() -> Any:
    """Return torchvision; if its compiled part cannot be loaded, plain operators replace it."""
    try:
        import torchvision
    except (RuntimeError, ImportError, OSError):
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define(
            "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
            "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor"
        )
        library.impl("nms", plain_nms, "CPU")
        library.impl("roi_align", plain_roi_align, "CPU")
        globals()["_library"] = library  # kept alive
        import torchvision

        for module in ("torchvision.extension", "torchvision.ops.roi_align"):
            sys.modules[module]._has_ops = lambda: True  # type: ignore[attr-defined]
    return torchvision


def plain_nms(dets: Any, scores: Any, iou_threshold: float) -> Any:
    """Return the indices of the boxes to keep, best first."""
    import torch
    from torchvision.ops import box_iou

    order = scores.argsort(descending=True, stable=True)
    close = (box_iou(dets[order], dets[order]) > iou_threshold).numpy()  # faster to index
    gone = np.zeros(len(order), dtype=bool)
    for place in range(len(order)):
        if not gone[place]:
            gone[place + 1 :] |= close[place, place + 1 :]
    return order[torch.from_numpy(~gone)]


def plain_roi_align(
    image: Any, rois: Any, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> Any:
    """Average bilinear samples in bins, with one matrix for each axis and box."""
    import torch

    out = image.new_zeros(len(rois), image.shape[1], height, width)
    for k, (index, *box) in enumerate(rois.tolist()):
        left, top, right, bottom = (side * scale - 0.5 * aligned for side in box)
        rows = _samples(top, bottom, height, image.shape[2], ratio, aligned).to(image)
        columns = _samples(left, right, width, image.shape[3], ratio, aligned).to(image)
        out[k] = torch.einsum("ph,chw,qw->cpq", rows, image[int(index)], columns)
    return out


def _samples(start: float, end: float, bins: int, pixels: int, ratio: int, aligned: bool) -> Any:
    """Return the weight of each pixel in each bin of one axis, of shape (bins, pixels)."""
    import torch

    length = end - start if aligned else max(end - start, 1.0)
    per_bin = ratio if ratio > 0 else max(1, -int(-length // bins))
    steps = (torch.arange(bins * per_bin, dtype=torch.float64) + 0.5) / (bins * per_bin)
    at = start + length * steps
    inside = (at >= -1) & (at <= pixels)
    gap = at.clamp(0, pixels - 1)[:, None] - torch.arange(pixels, dtype=torch.float64)
    weights = (1 - gap.abs()).clamp(min=0) * inside[:, None]
    return weights.view(bins, per_bin, pixels).mean(1)
