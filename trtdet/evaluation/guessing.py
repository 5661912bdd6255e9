"""Guesses the configuration of an ONNX model from its shapes and output values, and tries it on images.

:mod:`trtdet.exporter.onnx_file` recognises the head. :mod:`trtdet.evaluation.plausibility` tries pixel settings on
images and their mirror images. Other keys get the usual value for such heads. Each key has a comment with its origin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import yaml

from trtdet.config import COCO_CLASSES, Config, InputConfig
from trtdet.errors import ConfigError, one_line
from trtdet.evaluation.judging import FEWEST_IMAGES
from trtdet.evaluation.plausibility import Answer, Plausibility, Settled, examine_model, settle_model
from trtdet.evaluation.readings import QUESTIONS, plain
from trtdet.exporter import ExportOptions, onnx_file
from trtdet.exporter.forms import form_of
from trtdet.passes import Options, has_pairs, load_model
from trtdet.passes.protobuf import metadata
from trtdet.progress import Progress, silent
from trtdet.quantization import take_apart
from trtdet.tables import counted

_PIXELS = ("resize", "interpolation", "pad_value", "color", "scale", "mean", "std")
"""Keys of ``input`` that can be tried on images."""

_USUAL = "as usual for such heads"
_STRETCHED = "ultralytics rtdetr"
"""Start of the description of those models of Ultralytics that read stretched images, not letterboxes; lower case."""


@dataclass(frozen=True)
class Guess:
    """A guessed configuration.

    ``origins`` says where the value of each written key is from, by its path such as ``input.color``. ``unknown`` are
    the keys that only the user knows, each with a description of its placeholder. ``looks`` is None without images.
    ``answers`` has what the images say, by question; see :class:`trtdet.evaluation.plausibility.Settled`.
    ``note`` says what the model was recognised as.
    """

    config: Config
    origins: Mapping[str, str]
    unknown: Mapping[str, str]
    looks: Plausibility | None
    answers: Mapping[str, Answer] = field(default_factory=dict)
    note: str = ""

    @property
    def open(self) -> dict[str, str]:
        """What the two readings that are left of a question would mean, by question."""
        return {
            question: f"{counted(one.images)} leave two readings, of which the first is {one.chance} likely: "
            f"{one.rival.meant}"
            for question, one in self.answers.items()
            if one.rival is not None and not one.same
        }

    def named(self, classes: Sequence[str]) -> Guess:
        """The same with the names of the classes, in the model's order. Raises ConfigError: their number is wrong."""
        config, origin, unknown = _named(self.config, classes, described=False)
        return replace(self, config=config, origins={**self.origins, "classes": origin}, unknown=unknown)

    def text(self) -> str:
        """The YAML file, with the origin of each key as a comment."""
        content: dict[str, Any] = self.config.model_dump(mode="json", exclude_defaults=True)
        lines = ["# Guessed by trtdet init: each key says where it is from.", *self._entry("name", content["name"])]
        names = "coco" if self.config.classes == COCO_CLASSES else content["classes"]
        lines += self._entry("classes", names)
        # All pixel keys are written, defaults too: they are the first to check if a detector finds nothing.
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
        return _commented(key, value, self.origins.get(f"{section}.{key}".lstrip("."), _USUAL), width=110)


def guess_config(
    model: Path | str,
    images: Sequence[Path | str] = (),
    *,
    size: tuple[int, int] | None = None,
    classes: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Guess:
    """Guesses the configuration of an ONNX file; with images, also tries the usual alternatives on them.

    Args:
        images: at least 4 images that show the model's classes, the more the surer; no annotations are needed. Only as
            many are looked at as it takes.
        size: height and width in pixels, for a model with a dynamic size.
        classes: names in the model's order; None for those in its metadata.
        progress: gets the images that were looked at.

    Raises:
        ConfigError: the model's input is not one image, its size is needed, or the number of ``classes`` is wrong.
        UnknownHead: its outputs fit no supported head, or one by their shapes alone, which finds nothing sensible on
            the images; see :func:`draft`.
        ModelError: the model cannot be read or run.
        DataError: the images cannot be read.
    """
    model, files = Path(model), [Path(image) for image in images]
    loaded = load_model(model, allow_quantized=has_pairs(model))
    loaded = take_apart(loaded).model if has_pairs(loaded) else loaded
    config, note = onnx_file.guess(model, loaded, ExportOptions(size=size))
    origins = {"name": "the file's name", "input.size": "given" if size else "the model's own"}
    origins |= {"input.name": "the model's own"}
    origins |= {f"head.{key}": "from the shapes and values of the outputs" for key in type(config.head).model_fields}
    config, origins["classes"], unknown = _named(config, classes, onnx_file.class_names(loaded) is not None)
    usual = _usual(loaded)
    if len(files) < FEWEST_IMAGES:
        origins |= {f"input.{key}": f"{usual}; not tried: give {FEWEST_IMAGES} images or more" for key in _PIXELS}
        return Guess(config, origins=origins, unknown=unknown, looks=None, note=note)
    settled = settle_model(loaded, Options(config), files, progress=progress)
    if usual != _USUAL:
        settled = _decided(settled, loaded, given=config, files=files)
    if unknown and settled.looks.verdict == "not working":  # that many classes are a guess as well
        raise onnx_file.UnknownHead(
            f"by its shapes, '{model}' has a head of decode {config.head.decode} with {len(config.classes)} classes, "
            f"but on {counted(settled.looks.images)} it does not work: {'; '.join(settled.looks.symptoms)}",
            "write into a configuration what the outputs mean (docs/heads.md), or give the names with --classes if the "
            "head is right",
            onnx_file.described(loaded, config),
        )
    tried = _tried(config, settled, usual)
    for key, said in tried.items():
        section, _, name = key.partition(".")
        if section == "head" and origins.get(key):
            said = f"{origins[key]}; {said}"
        if name in (_PIXELS if section == "input" else type(config.head).model_fields):
            origins[key] = said
    return Guess(settled.config, origins, unknown=unknown, looks=settled.looks, answers=settled.answers, note=note)


def _usual(model: onnx.ModelProto) -> str:
    """Where the pixel keys of a guess are from before images are looked at."""
    form = form_of(model)
    description = metadata(model).get("description", "")
    if form is not None and form.name == "Ultralytics" and not description.lower().startswith(_STRETCHED):
        return f"as {form.name}, which wrote the file, reads images"
    return _USUAL


def _decided(settled: Settled, model: onnx.ModelProto, given: Config, files: Sequence[Path]) -> Settled:
    """With the readings of ``given`` for each question that the images leave undecided."""
    sure = {question: one for question, one in settled.answers.items() if one.rival is None}
    open_keys = {key for question in settled.answers.keys() - sure.keys() for key in QUESTIONS[question]}
    back = open_keys & settled.first.better.keys()
    if not back:
        return replace(settled, answers=sure)
    values, before = settled.config.model_dump(), given.model_dump()
    for section, _, name in (key.partition(".") for key in back):
        values[section][name] = before[section][name]
    config = Config.model_validate(values)
    better = {key: value for key, value in settled.first.better.items() if key not in back}
    first = replace(settled.first, better=better)
    return Settled(config, first, examine_model(model, Options(config), files, alternatives=False), answers=sure)


def _tried(guess: Config, settled: Settled, usual: str) -> dict[str, str]:
    """What the images say of each key that can be tried, by its path; ``usual`` is the origin of the others."""
    looks, notes = settled.looks, {}
    given = guess.model_dump(mode="json")
    for question, keys in QUESTIONS.items():
        for key in keys:
            section, _, name = key.partition(".")
            if key in settled.first.better:
                note = f"tried on images, in place of {plain(given[section][name])}"
            elif section == "input":
                note = usual
            else:
                note = ""
            if question in settled.answers:
                note = "; ".join(part for part in (note, settled.answers[question].text) if part)
            elif looks.verdict != "working" and section == "input" and usual == _USUAL:
                note = f"{note}; the images cannot tell"
            if note:
                notes[key] = note
    return notes


def draft(known: onnx_file.Described, problem: str, classes: Sequence[str] | None = None) -> str:
    """A YAML draft for a model whose head was not recognised; keys that the user must fill in are comments.

    ``problem`` says why the head was not recognised; ``classes`` None takes the names in the model's metadata.
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
    """Lines of YAML with a comment: after a value of one line, above a longer one.

    Keys keep their order: an expression may use those before it.
    """
    flow = None if isinstance(value, list) else False
    text = yaml.safe_dump({key: value}, allow_unicode=True, sort_keys=False, default_flow_style=flow, width=width)
    lines: list[str] = text.splitlines()
    return [f"{lines[0]}  # {note}"] if len(lines) == 1 else [f"# {note}", *lines]


def _named(config: Config, names: Sequence[str] | None, described: bool) -> tuple[Config, str, dict[str, str]]:
    """The configuration with class names, their origin, and the ``unknown`` keys of :class:`Guess`."""
    count = len(config.classes)
    if names is not None:
        if len(names) != count:
            raise ConfigError(
                f"--classes names {len(names)}, and the model has {count}", "give a name for each, in the model's order"
            )
        return Config.model_validate(config.model_dump() | {"classes": tuple(names)}), "given", {}
    if described:
        return config, "the model's metadata", {}
    if config.classes == COCO_CLASSES:
        return config, f"those of COCO, as there are {count}", {}
    if config.classes != onnx_file.placeholders(count):
        return config, _USUAL, {}
    note = f"{count} names in the order of training: the model does not hold them"
    return config, f"put here {note}", {"classes": note}
