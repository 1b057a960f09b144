"""Prune a detector of Ultralytics to half of its MACs, and use the small one.

python examples/ultralytics_train.py coco8.yaml --model yolo11n.pt --epochs 100
"""

from __future__ import annotations

import argparse
from typing import Any

from ultralytics import YOLO

from polarprune.integrations.ultralytics import PruningTrainer


def main(data: str, model: str = "yolo11n.pt", macs: float = 0.5, **options: Any) -> YOLO:
    """Train and prune, print what is left, and return the small detector."""
    detector = YOLO(model)
    detector.train(trainer=PruningTrainer.with_budget(macs=macs), data=data, **options)
    pruner = detector.trainer.pruner
    print(pruner.report())
    print("the small model is", detector.trainer.best)
    return detector  # it holds the model of best.pt now


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a data set, such as coco8.yaml")
    parser.add_argument("--model", default="yolo11n.pt")
    parser.add_argument("--macs", type=float, default=0.5, help="the share of MACs to keep")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--device", default="cpu")
    given = vars(parser.parse_args())
    main(given.pop("data"), **given)
