"""The detector of cards that benchmarks/train_cards.py trained, and its configuration for each of its parts."""

from pathlib import Path
from typing import Any

from benchmarks import cards
from trtdet.config import Config

MODEL = Path(__file__).parent / "fixtures" / "cards.onnx"
HEADS: dict[str, dict[str, Any]] = {
    "masks": {"outputs": ["boxes", "scores", "mask_coefficients", "prototypes"], "masks": True},
    "keypoints": {
        "outputs": ["boxes", "scores", "keypoints"],
        "keypoints": {"names": list(cards.POINTS), "sigmas": [0.05] * len(cards.POINTS)},
    },
    "rotated_boxes": {"outputs": ["rotated", "scores", "angles"], "rotated": True},
}
"""The head of each part."""


def configured(task: str) -> Config:
    return Config.model_validate(
        {
            "name": "cards",
            "classes": cards.CLASSES,
            "input": {"size": cards.SIZE, "resize": "letterbox-topleft", "scale": 1 / 255},
            "head": {"decode": "boxes", "boxes": "cxcywh", **HEADS[task]},
            "nms": {"iou_threshold": 0.6, "score_threshold": 0.01},
        }
    )
