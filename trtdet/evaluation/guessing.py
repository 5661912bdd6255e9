"""A configuration for an ONNX model that nobody has described: guessed from its shapes and values, tried on images.

What shapes say and what outputs show is in :mod:`trtdet.exporter.recognition`; how the pixels are read is found by
looking at what the detector makes of images and their mirror images (:mod:`trtdet.evaluation.plausibility`). What
neither can tell is as usual for such heads, and each key says where it is from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import yaml

from trtdet.config import COCO_CLASSES, Config, InputConfig
from trtdet.errors import ConfigError, one_line
from trtdet.evaluation.plausibility import FEWEST_IMAGES, Plausibility, examine_model
from trtdet.exporter import ExportOptions, onnx_file, recognition
from trtdet.passes import Options, load_model

_PIXELS = ("resize", "color", "scale", "mean", "std")
"""The keys of ``input`` that detections tell apart."""

_USUAL = "as usual for such heads"


@dataclass(frozen=True)
class Guess:
    """A configuration, and where each key of it is from.

    Attributes:
        config: the whole configuration.
        origins: for each key that is written, by its path such as ``input.color``, where its value is from.
        unknown: the keys that only the user knows, each with what is in its place.
        looks: what the detections look like with it; None where no images were given.
    """

    config: Config
    origins: Mapping[str, str]
    unknown: Mapping[str, str]
    looks: Plausibility | None

    def text(self) -> str:
        """The YAML file, with the origin of each key as a comment."""
        content: dict[str, Any] = self.config.model_dump(mode="json", exclude_defaults=True)
        lines = ["# Guessed by trtdet init: each key says where it is from.", *self._entry("name", content["name"])]
        names = "coco" if self.config.classes == COCO_CLASSES else content["classes"]
        lines += self._entry("classes", names)
        # Pixels are written out whole: they are what is looked at first where a detector finds nothing.
        shown = {
            "input": self.config.input.model_dump(mode="json", exclude={"name"} - set(content["input"])),
            "head": {"decode": self.config.head.decode, **content["head"]},
            "nms": content.get("nms", {}),
        }
        for section, keys in shown.items():
            if section == "nms" and not self.config.nms.suppresses and set(keys) == {"iou_threshold"}:
                lines += self._entry("nms", "none")
            elif keys:
                lines.append(f"{section}:")
                lines += [f"  {line}" for key, value in keys.items() for line in self._entry(key, value, section)]
        return "\n".join(lines) + "\n"

    def _entry(self, key: str, value: Any, section: str = "") -> list[str]:
        path = f"{section}.{key}" if section else key
        # Expressions, of which each may name those before it, stay in their order and stand a line each.
        return _commented(key, value, self.origins.get(path, _USUAL), width=110)


def guess_config(
    model: Path,
    images: Sequence[Path] = (),
    *,
    size: tuple[int, int] | None = None,
    classes: Sequence[str] | None = None,
) -> Guess:
    """Guesses a model's configuration and, where images are given, tries the usual others on them.

    Args:
        model: an ONNX file.
        images: pictures of what the detector finds, 4 or more; they need no annotations.
        size: height and width in pixels, for a model that leaves them open.
        classes: names in the order of the model's classes; None for those in its metadata.

    Raises:
        ConfigError: the model has not one image as its input, its size is needed, or ``classes`` are of another number.
        UnknownHead: no head that is known fits its outputs, see :func:`draft`.
        ModelError: the model cannot be read or run.
        DataError: the images cannot be read.
    """
    loaded = load_model(model)
    config, _ = onnx_file.guess(model, loaded, ExportOptions(size=size))
    origins = {"name": "the file's name", "input.size": "given" if size else "the model's own"}
    origins |= {"input.name": "the model's own"}
    origins |= {f"head.{key}": "from the shapes and values of the outputs" for key in type(config.head).model_fields}
    config, origins["classes"], unknown = _named(config, classes, recognition.class_names(loaded) is not None)
    if len(images) < FEWEST_IMAGES:
        origins |= {f"input.{key}": f"{_USUAL}; not tried: give {FEWEST_IMAGES} images or more" for key in _PIXELS}
        return Guess(config, origins=origins, unknown=unknown, looks=None)
    config, first, looks = settled(loaded, config, images)
    if first.better:
        gain = f"{first.gain:.3g} times as sure on {first.images} images as what is {_USUAL[3:]}"
        origins |= dict.fromkeys(first.better, gain)
    if looks.obstacle:
        kept = f"{_USUAL}; could not be tried: {looks.obstacle}"
    else:
        kept = f"{_USUAL}; no other was clearly better on {looks.images} images"
    for key in _PIXELS:
        origins.setdefault(f"input.{key}", kept)
    return Guess(config, origins=origins, unknown=unknown, looks=looks)


def draft(known: recognition.Described, problem: str, classes: Sequence[str] | None = None) -> str:
    """What is known of a model whose head is not, as a YAML file that the user finishes: open keys are comments.

    The problem says why the head is not known; classes are names that were given, None for those that the model has.
    """
    shapes = {name: ", ".join(["B", *map(str, shape[1:])]) for name, shape in known.shapes.items()}
    outputs = one_line(", ".join(f"'{name}' ({sizes})" for name, sizes in shapes.items()), 2000)
    names = classes or known.classes
    pixels = InputConfig(size=known.size, scale=1 / 255).model_dump(mode="json", include=set(_PIXELS))
    choices = {"resize": "letterbox-centre, letterbox-topleft or stretch", "color": "rgb or bgr"}
    formula = "a pixel becomes (x * scale - mean) / std"
    lines = [
        f"# A draft by trtdet init, which cannot finish it: {one_line(problem)}.",
        "# Lines that begin with # are open: write what is right and take the # away, see docs/heads.md.",
        _commented("name", known.name, "the file's name")[0],
        _commented("classes", list(names), "given" if classes else "the model's metadata")[0]
        if names
        else "# classes: [a, b]  # names in the order of training: the model does not hold them",
        "input:",
        "  " + _commented("name", known.input_name, "the model's own")[0],
        "  " + _commented("size", list(known.size), "height and width of the network's input")[0],
        *(f"  # {_commented(key, value, choices.get(key, formula))[0]}" for key, value in pixels.items()),
        "head:",
        "  decode: boxes",
        f"  # What the outputs mean: {outputs}.",
        "  # compute:",
        "  #   boxes: output0[..., :4]  # (B, N, 4), in the form of head.boxes and head.units",
        "  #   scores: output0[..., 4:]  # (B, N, classes)",
    ]
    return "\n".join(lines) + "\n"


def _commented(key: str, value: Any, note: str, width: int = 10**6) -> list[str]:
    """Lines of YAML with a comment: a value of one line has it behind, one of several has it above."""
    flow = None if isinstance(value, list) else False
    text = yaml.safe_dump({key: value}, allow_unicode=True, sort_keys=False, default_flow_style=flow, width=width)
    lines: list[str] = text.splitlines()
    return [f"{lines[0]}  # {note}"] if len(lines) == 1 else [f"# {note}", *lines]


def settled(
    model: onnx.ModelProto, config: Config, images: Sequence[Path]
) -> tuple[Config, Plausibility, Plausibility]:
    """A guess of a float model's configuration with what is clearly better on images in the place of its keys.

    Returns:
        The configuration, what the guess looks like, and what the configuration looks like, in which nothing better is
        looked for any more.
    """
    first = examine_model(model, Options(config), images)
    if not first.better:
        return config, first, first
    data = config.model_dump()
    for path, value in first.better.items():
        section, _, key = path.partition(".")
        data[section][key] = value
    better = Config.model_validate(data)
    looks = examine_model(model, Options(better), images)
    return better, first, replace(looks, better={}, better_text="", gain=1.0)


def _named(config: Config, given: Sequence[str] | None, described: bool) -> tuple[Config, str, dict[str, str]]:
    """The configuration with class names, where they are from, and what is unknown of them."""
    count = len(config.classes)
    if given is not None:
        if len(given) != count:
            raise ConfigError(
                f"--classes names {len(given)}, and the model has {count}",
                "give a name for each, in the model's order",
            )
        return Config.model_validate(config.model_dump() | {"classes": tuple(given)}), "given", {}
    if described:
        return config, "the model's metadata", {}
    if config.classes == COCO_CLASSES:
        return config, f"those of COCO, as there are {count}", {}
    if config.classes != recognition.placeholders(count):
        return config, _USUAL, {}
    note = f"{count} names in the order of training: the model does not hold them"
    return config, f"put here {note}", {"classes": note}
