"""What the trainings with ultralytics' own trainer share: narrow networks, data files, and settings for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

# fmt: off
SETTINGS: dict[str, Any] = {
    "batch": 16, "nbs": 16, "workers": 0, "device": "cpu", "optimizer": "AdamW", "warmup_epochs": 1, "seed": 1,
    "mosaic": 0.0, "hsv_h": 0.0, "hsv_s": 0.2, "hsv_v": 0.2, "translate": 0.1,
    "plots": False, "amp": False, "val": False, "pretrained": False, "exist_ok": True,
}
# fmt: on
"""Arguments of ``YOLO.train``."""


def write_network(
    folder: Path, source: str, scale: tuple[float, float, int], classes: Sequence[str], **more: Any
) -> Path:
    """Writes a network of the package, made narrower, and returns its YAML file.

    ``source`` is the package's file below ``cfg/models``, such as ``v8/yolov8-pose``; ``scale`` is depth, width, and
    the most channels before the width; ``more`` are further keys of the file.
    """
    import ultralytics

    models = Path(ultralytics.__file__).parent / "cfg/models"
    network = yaml.safe_load((models / f"{source}.yaml").read_text())
    network |= {"nc": len(classes), "scales": {"t": list(scale)}, "scale": "t", **more}
    path = folder / f"{Path(source).name}.yaml"
    path.write_text(yaml.safe_dump(network))
    return path


def write_description(folder: Path, data: Path, classes: Sequence[str], **more: Any) -> Path:
    """Writes ``folder/data.yaml``, which describes the splits ``train`` and ``val`` in ``data``, and returns it."""
    described = {"path": str(data.resolve()), "train": "images/train", "val": "images/val"}
    path = folder / "data.yaml"
    path.write_text(yaml.safe_dump({**described, **more, "names": dict(enumerate(classes))}))
    return path
