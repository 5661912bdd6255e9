"""How many keys ``trtdet init`` gets right without help, on detectors from public repositories: docs/results/init.md.

    python benchmarks/init_keys.py FOLDER --images DIR [--only NAME ...] [--copies]

FOLDER holds the models, NAME.onnx, which the configurations in benchmarks/detectors say where to find; those that are
absent are left out. What is right stands in the configuration NAME.yaml beside the model, or else in
benchmarks/detectors. Where a head is not recognised, the right one is told, and the pixels start as is usual.
``--copies`` adds, for each model, one with its input channels swapped, one that takes pixels of 0 to 255 and
normalises them itself, and one with its input as (B, H, W, 3). ``--random N`` instead counts warnings of the input
check on right configurations, with N random sets of 4 to 16 images each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from trtdet.config import Config, InputConfig, load_config
from trtdet.data import evenly, find_images
from trtdet.data.images import preprocess, read_image
from trtdet.errors import TrtdetError
from trtdet.evaluation import plausibility
from trtdet.evaluation.guessing import guess_config
from trtdet.evaluation.plausibility import Answer, Plausibility, settle_model
from trtdet.evaluation.readings import COLOR, NORMALISATION, RESIZE
from trtdet.passes import Options, load_model
from trtdet.runtime.detector import Detector

CONFIGS = Path(__file__).parent / "detectors"


def right(truth: Config, config: Config, model: Path, images: Sequence[Path]) -> dict[str, bool]:
    """Of each key whether it is right; scale, mean and standard deviation count as one."""
    levels = []
    for given in (truth.input, config.input):
        order = 1 if given.color == "rgb" else -1
        pairs = list(zip(given.mean[::order], given.std[::order], strict=True))
        levels.append([(pixel * given.scale - mean) / std for pixel in (0, 255) for mean, std in pairs])
    near = max(abs(one - other) for one, other in zip(*levels, strict=True)) <= 0.02 * (max(levels[0]) - min(levels[0]))
    return {
        "classes": config.classes == truth.classes,
        "input.size": config.input.size == truth.input.size,
        "input.name": True,  # the model's own, or it could not be run
        RESIZE: config.input.resize == truth.input.resize,
        COLOR: config.input.color == truth.input.color,
        NORMALISATION: near,
        "head": same_head(truth, config, model, images),
    }


def same_head(truth: Config, config: Config, model: Path, images: Sequence[Path]) -> bool:
    """Whether both heads give the same boxes, within 0.05 pixels, on right pixels of four images."""
    if len(truth.classes) != len(config.classes):
        return False
    both = []
    for head in (truth, config):
        pixels = truth.input.model_copy(update={"name": head.input.name})
        both.append(Detector.open(model, head.model_copy(update={"input": pixels, "nms": truth.nms})))
    for path in images[:4]:
        pixels, _ = preprocess(read_image(path), truth.input)
        (boxes, scores, classes), (others, its_scores, its_classes) = (
            detector.run(pixels[None]).over(0.05).image(0) for detector in both
        )
        if len(boxes) != len(others) or not np.array_equal(np.sort(classes), np.sort(its_classes)):
            return False
        if not np.allclose(scores, its_scores, atol=1e-3) or not np.allclose(
            np.sort(boxes, axis=0), np.sort(others, axis=0), atol=0.05
        ):
            return False
    return True


@dataclass(frozen=True)
class Found:
    """What was found for a model: the configuration, what the images say by question, and whether it seems to work."""

    config: Config
    answers: Mapping[str, Answer]
    looks: Plausibility | None


def found(model: Path, config: Config, images: tuple[Path, ...]) -> tuple[Found, bool]:
    """What ``init`` finds, and whether it recognised the head; ``config`` tells it one that it does not recognise."""
    try:
        guess = guess_config(model, images)
        return Found(guess.config, guess.answers, guess.looks), True
    except TrtdetError:
        pass
    usual = InputConfig(size=config.input.size, name=config.input.name, scale=1 / 255)
    settled = settle_model(load_model(model), Options(config.model_copy(update={"input": usual})), images)
    return Found(settled.config, settled.answers, settled.looks), False


def row(name: str, model: Path, truth: Config, images: tuple[Path, ...]) -> tuple[str, list[int]]:
    """A line of the table, and its numbers: keys, those right, those wrong and said to be sure, pixels' keys, right."""
    began = time.perf_counter()
    try:
        got, recognised = found(model, truth, images)
    except TrtdetError as error:
        problem = str(error).partition(" at an input")[0][:60]
        return f"| {name} | refused: {problem} | | | | | {time.perf_counter() - began:.0f} |", [7, 0, 0, 3, 0]
    marks = right(truth, got.config, model, images)
    sure = {question for question, one in got.answers.items() if one.rival is None}
    wrong = [key for key, good in marks.items() if not good]
    bad = [key for key in wrong if key in sure]
    left = [
        f"{question} ({'same' if one.same else f'{100 * one.sure:.0f} %'})"
        for question, one in got.answers.items()
        if one.rival is not None
    ]
    pixels = [marks[key] for key in (RESIZE, COLOR, NORMALISATION)]
    head = "recognised" if recognised else "told"
    looks = "-"
    if got.looks is not None:
        looks = f"{got.looks.verdict}, {got.looks.boxes:.1f} boxes, {got.looks.images} images"
    cells = [name, head, f"{sum(pixels)} of 3", ", ".join(wrong) or "-", ", ".join(bad) or "-", ", ".join(left) or "-"]
    cells += [looks, f"{time.perf_counter() - began:.0f}"]
    return f"| {' | '.join(cells)} |", [len(marks), sum(marks.values()), len(bad), 3, sum(pixels)]


def copies(model: Path, config: Config, folder: Path) -> list[tuple[str, Path, Config]]:
    """Copies of a model with other pixels, and what is right: channels swapped, normalisation in it, channels last."""
    pixels = config.input
    inner = np.array(pixels.std, np.float32).reshape(1, 3, 1, 1)
    offset = np.array(pixels.mean, np.float32).reshape(1, 3, 1, 1)
    swapped = pixels.model_copy(
        update={
            "color": "bgr" if pixels.color == "rgb" else "rgb",
            "mean": pixels.mean[::-1],
            "std": pixels.std[::-1],
        }
    )
    plain = pixels.model_copy(update={"scale": 1.0, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    made = []
    for what, right_input in (("swapped", swapped), ("normalises itself", plain), ("channels last", pixels)):
        if right_input == pixels and what == "normalises itself":
            continue
        loaded = load_model(model)
        graph, name = loaded.graph, loaded.graph.input[0].name
        for node in graph.node:
            node.input[:] = ["fed_pixels" if read == name else read for read in node.input]
        if what == "swapped":
            graph.initializer.append(numpy_helper.from_array(np.array([2, 1, 0]), "fed_order"))
            nodes = [helper.make_node("Gather", [name, "fed_order"], ["fed_pixels"], axis=1)]
        elif what == "channels last":
            dims = graph.input[0].type.tensor_type.shape.dim
            channels = onnx.TensorShapeProto.Dimension(dim_value=3)
            last = [dims[0], dims[2], dims[3], channels]
            graph.input[0].type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto(dim=last))
            nodes = [helper.make_node("Transpose", [name], ["fed_pixels"], perm=[0, 3, 1, 2])]
        else:
            graph.initializer.append(numpy_helper.from_array((np.float32(pixels.scale) / inner), "fed_scale"))
            graph.initializer.append(numpy_helper.from_array(offset / inner, "fed_offset"))
            nodes = [
                helper.make_node("Mul", [name, "fed_scale"], ["fed_scaled"]),
                helper.make_node("Sub", ["fed_scaled", "fed_offset"], ["fed_pixels"]),
            ]
        for node in reversed(nodes):
            graph.node.insert(0, node)
        path = folder / f"{model.stem}-{what.replace(' ', '-')}.onnx"
        onnx.save(loaded, str(path))
        made.append((f"{model.stem}, {what}", path, config.model_copy(update={"input": right_input})))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the models")
    parser.add_argument("--images", type=Path, help="pictures of what they detect")
    parser.add_argument("--num-images", type=int, default=128)
    parser.add_argument("--only", nargs="+", help="these models alone")
    parser.add_argument("--copies", action="store_true", help="and their copies")
    parser.add_argument("--random", type=int, default=0, help="random sets of images instead")
    options = parser.parse_args()
    images = evenly(find_images(options.images), options.num_images) if options.images else ()
    models: list[tuple[Path, Config]] = []
    for path in sorted(options.folder.glob("*.onnx")):
        if path.stem not in (options.only or [path.stem]):
            continue
        beside = path.with_suffix(".yaml")
        known = beside if beside.is_file() else CONFIGS / beside.name
        if known.is_file():
            models.append((path, load_config(str(known))))
    if options.random:
        false_alarms(models, images, options.random)
        return
    print("| model | head | pixels' keys right | wrong | wrong and sure | undecided | it looks | seconds |")
    print("|---" * 8 + "|")
    total = np.zeros(5, int)
    with tempfile.TemporaryDirectory() as folder:
        for path, config in models:
            cases = [(path.stem, path, config)]
            if options.copies:
                cases += copies(path, config, Path(folder))
            for name, model, truth in cases:
                line, numbers = row(name, model, truth, images)
                total += numbers
                print(line, flush=True)
    print(f"\n{total[1]} of {total[0]} keys right, {total[4]} of {total[3]} of the pixels; {total[2]} wrong and sure")


def false_alarms(models: list[tuple[Path, Config]], images: tuple[Path, ...], sets: int) -> None:
    """Prints how often the input check warns on right configurations with few random images."""
    rng = np.random.default_rng(0)
    print("| model | sets | working | cannot tell | warned of |\n|---|---|---|---|---|")
    for path, config in models:
        verdicts: Counter[str] = Counter()
        subject = plausibility._of_model(load_model(path), Options(config))
        cache: dict[Any, Any] = {}  # an image is looked at once, however many sets have it
        for _ in range(sets):
            chosen = [images[index] for index in rng.choice(len(images), int(rng.integers(4, 17)), replace=False)]
            first = plausibility._settled(subject, chosen, cache=cache).first
            verdicts[first.verdict] += 1
            if first.better or first.symptoms:
                print(f"<!-- {path.stem}: {first.warning} -->", flush=True)
        silent, unknown = verdicts["working"], verdicts["cannot tell"]
        print(f"| {path.stem} | {sets} | {silent} | {unknown} | {sets - silent - unknown} |", flush=True)


if __name__ == "__main__":
    main()
