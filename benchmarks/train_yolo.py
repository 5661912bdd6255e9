"""Trains a small YOLO26 or YOLO12 with ultralytics' own trainer on the synthetic shapes, for docs/results/nms-free.md.

The network is that of the package's YAML file made narrower, for ten classes. On one core an epoch takes one to four
minutes.

    pip install ultralytics
    python benchmarks/train_yolo.py DIR --network yolo26
    trtdet export ultralytics:DIR/runs/yolo26/weights/last.pt -o DIR/yolo26.onnx
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ultralytics_training import SETTINGS, write_description, write_network

from trtdet.demo.shapes import CLASSES, generate

SIDES = {"yolo26": 160, "yolo12": 128}
"""Of the network's input, in pixels."""

SCALES = {"yolo26": (0.50, 0.125, 1024), "yolo12": (0.50, 0.25, 512)}
"""Depth, width, and the most channels before the width; the package's smallest are (0.50, 0.25, 1024). The attention of
YOLO12 has heads of 32 channels, which a width of 0.25 leaves in all its blocks, and a smaller one does not."""


def write_data(folder: Path, images: int) -> Path:
    """Writes the splits ``train`` and ``val`` as ultralytics reads them; gives the file that describes them."""
    for split, count in (("train", images), ("val", 200)):
        made = generate(folder / "coco", split, count)
        document = json.loads(made.annotations.read_text())
        lines: dict[int, list[str]] = {image["id"]: [] for image in document["images"]}
        sizes = {image["id"]: (image["width"], image["height"]) for image in document["images"]}
        for entry in document["annotations"]:
            (width, height), (x, y, w, h) = sizes[entry["image_id"]], entry["bbox"]
            box = ((x + w / 2) / width, (y + h / 2) / height, w / width, h / height)
            lines[entry["image_id"]].append(" ".join([str(entry["category_id"] - 1), *(f"{v:.6f}" for v in box)]))
        for kind in ("images", "labels"):
            (folder / "yolo" / kind / split).mkdir(parents=True, exist_ok=True)
        for image in document["images"]:
            link = folder / "yolo" / "images" / split / image["file_name"]
            link.unlink(missing_ok=True)
            link.symlink_to((made.images / image["file_name"]).resolve())
            label = folder / "yolo" / "labels" / split / f"{Path(image['file_name']).stem}.txt"
            label.write_text("\n".join(lines[image["id"]]))
    return write_description(folder, folder / "yolo", CLASSES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--network", choices=tuple(SCALES), required=True)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--images", type=int, default=2000)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    data = write_data(arguments.folder, arguments.images)
    source = f"{arguments.network.removeprefix('yolo')}/{arguments.network}"
    network = write_network(arguments.folder, source, SCALES[arguments.network], CLASSES)
    from ultralytics import YOLO

    YOLO(network).train(
        **SETTINGS,
        data=data,
        imgsz=SIDES[arguments.network],
        epochs=arguments.epochs,
        lr0=0.003,
        scale=0.2,
        project=str((arguments.folder / "runs").resolve()),
        name=arguments.network,
    )


if __name__ == "__main__":
    main()
