"""Detectors of transformers: a folder that ``save_pretrained`` wrote, or a model of the Hugging Face hub.

They are of the DETR family (Carion et al. 2020, arXiv:2005.12872): a fixed number of queries, each with class logits
and a box. The scores follow ``post_process_object_detection`` of each family's image processor.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from trtdet.config import Config, HeadConfig, InputConfig, NmsConfig
from trtdet.data.folders import first_names
from trtdet.errors import ConfigError, ModelError
from trtdet.exporter import ExportOptions
from trtdet.exporter.trials import SourceModel, first_line, quiet, resized

_SCORES: dict[str, Literal["logits", "softmax"]] = {
    **dict.fromkeys(("rt_detr", "rt_detr_v2", "d_fine", "deimv2", "rf_detr", "lw_detr"), "logits"),
    **dict.fromkeys(("conditional_detr", "deformable_detr", "dab-detr"), "logits"),
    **dict.fromkeys(("detr", "yolos"), "softmax"),
}
"""How each family turns logits into scores: a sigmoid per class, or a softmax with a column for no object."""

_NO_CLASS = ("N/A", "")
"""Names of category ids that COCO does not use."""

_INTERPOLATIONS: dict[int, Literal["nearest", "linear", "cubic", "area"]] = {0: "nearest", 2: "linear", 3: "cubic"}
"""Interpolation by Pillow's filter number."""

_GREY = 114


def load(place: str, options: ExportOptions) -> SourceModel:
    """A detector of transformers, with the configuration of its folder, or of a hub id that transformers downloads.

    No code of the folder runs: its weights are read as safetensors, or as a pickle of tensors only.
    """
    if options.weights is not None:
        raise ConfigError(f"export of 'hf:{place}' reads the weights of its folder; leave --weights away")
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ModelError(
            f"export of 'hf:{place}' needs transformers, which is not installed; install it with: "
            "pip install 'transformers>=5'"
        ) from None
    settings = _settings(place, "config.json")
    if settings is None:
        lacks = "has" if Path(place).is_dir() else "is no folder here, and of that id the hub gives"
        raise ModelError(
            f"'{place}' {lacks} no config.json; give a folder that save_pretrained wrote, or the id of a model of the "
            "hub where it can be reached"
        )
    family = settings.get("model_type")
    if family not in _SCORES:
        raise ModelError(f"'{place}' is a model of type {family!r}, allowed are {', '.join(sorted(_SCORES))}")
    model = _model(place)
    config = resized(options.config or _config(place, model.config, family), options.size)
    _keep_positions(place, model, config.input)
    return SourceModel(f"hf:{place}", _Queries(model), config, unordered=True, for_dynamo=_unchecked)


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Stops transformers from comparing shapes with operators that have no ONNX form."""
    name = "TRANSFORMERS_DISABLE_TORCH_CHECK"
    before = {key: value for key, value in os.environ.items() if key == name}
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update(before)


class _Queries(nn.Module):
    """Returns ``logits`` (B, N, C) or (B, N, C + 1), and ``pred_boxes`` (B, N, 4) as shares of the input's sides."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = self.model(pixel_values=x)
        return {"logits": outputs.logits, "pred_boxes": outputs.pred_boxes}


def _settings(place: str, name: str) -> dict[str, Any] | None:
    """A JSON file of the folder or of the hub; None if it does not exist."""
    file: Path | str | None = Path(place) / name
    if not Path(place).is_dir():
        from transformers.utils import cached_file

        try:
            with _quiet():
                file = cached_file(
                    place,
                    name,
                    _raise_exceptions_for_gated_repo=False,
                    _raise_exceptions_for_missing_entries=False,
                    _raise_exceptions_for_connection_errors=False,
                )
        except (OSError, ValueError):  # not a hub id
            return None
    if file is None or not Path(file).is_file():
        return None
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"'{name}' of '{place}' cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ModelError(f"'{name}' of '{place}' is {type(content).__name__}, expected an object of JSON")
    return content


def _model(place: str) -> nn.Module:
    from transformers import AutoModelForObjectDetection

    try:
        with _quiet():
            model, loading = AutoModelForObjectDetection.from_pretrained(
                place,
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
                # Attention as MatMul, Softmax and MatMul: engines fuse this form, and Q/DQ placement expects it.
                attn_implementation="eager",
            )
    except Exception as error:  # files, packages and shapes can each be wrong in their own way
        raise ModelError(f"'{place}' cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
    missing = sorted(str(key) for key in (*loading["missing_keys"], *loading["mismatched_keys"]))
    if missing:
        raise ModelError(
            f"'{place}' lacks {len(missing)} weights of the model, or has them in another shape: "
            f"{first_names(missing)}; save the whole detector with save_pretrained"
        )
    return model.float().eval()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides notes and progress bars of transformers; errors are raised or in the loading info."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet("transformers"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _keep_positions(source: str, model: nn.Module, input_config: InputConfig) -> None:
    """Stores resized position embeddings in the model: a trace of the resizing needs a filter of opset 18."""
    resizing = [module for module in model.modules() if hasattr(module, "interpolate_pos_encoding")]
    for module in resizing:
        # The result depends only on the input size, so it is computed once.
        own, results = cast(Callable[..., Tensor], module.interpolate_pos_encoding), list[Tensor]()

        def kept(*arguments: Any, own: Any = own, results: list[Tensor] = results) -> Tensor:
            if not results:
                results.append(own(*arguments).detach())
            return results[0]

        module.interpolate_pos_encoding = kept  # type: ignore[assignment]
    if not resizing:
        return
    try:
        with torch.no_grad():
            model(pixel_values=torch.zeros(1, 3, input_config.height, input_config.width))
    except Exception as error:  # of the model's own code
        raise ModelError(
            f"'{source}' cannot run on an input of {input_config.height}x{input_config.width}: {first_line(error)}; "
            "check input.size"
        ) from error


def _config(place: str, settings: Any, family: str) -> Config:
    names = {int(index): str(name) for index, name in settings.id2label.items()}
    columns = tuple(index for index in sorted(names) if names[index] not in _NO_CLASS)
    scores = _SCORES[family]
    has_gaps = len(columns) < len(names)
    head = HeadConfig(
        decode="boxes",
        boxes="cxcywh",
        units="relative",
        scores=scores,
        background="last" if scores == "softmax" and not has_gaps else "none",
        columns=columns if has_gaps else None,
        outputs=("pred_boxes", "logits"),
    )
    queries = getattr(settings, "num_queries", None) or settings.num_detection_tokens
    nms = NmsConfig(
        iou_threshold=1.0, max_detections=queries, candidates="all-classes" if scores == "logits" else "best-class"
    )
    name = Path(place).name or "detector"
    try:
        classes = tuple(names[index] for index in columns)
        return Config(name=name, classes=classes, input=_input(place, settings), head=head, nms=nms)
    except ValueError as error:
        raise ConfigError(
            f"the labels of '{place}' are no class names: {first_line(error)}; give a configuration with --config"
        ) from None


def _input(place: str, settings: Any) -> InputConfig:
    """The input as ``preprocessor_config.json`` describes it."""
    processor = _settings(place, "preprocessor_config.json")
    if processor is None:
        processor = (_settings(place, "processor_config.json") or {}).get("image_processor")
    if not isinstance(processor, dict):
        raise ConfigError(
            f"'{place}' has no preprocessor_config.json, which says what the pixels look like; save the image "
            "processor beside the model, or give a configuration with --config"
        )
    stated = processor.get("size")
    sides = stated if isinstance(stated, dict) else {}
    resize: Literal["letterbox-topleft", "stretch"] = "letterbox-topleft"
    if {"height", "width"} <= sides.keys():
        size, resize = (int(sides["height"]), int(sides["width"])), "stretch"
    elif {"max_height", "max_width"} <= sides.keys():
        size = int(sides["max_height"]), int(sides["max_width"])
    elif {"shortest_edge", "longest_edge"} <= sides.keys():
        # A family for images of any size: the input has both edges, in landscape, as multiples of the largest stride.
        size = -(-int(sides["shortest_edge"]) // 32) * 32, -(-int(sides["longest_edge"]) // 32) * 32
    else:
        raise ConfigError(f"'{place}' gives its input's size as {stated!r}; give a configuration with --config")
    normalised = bool(processor.get("do_normalize", "image_mean" in processor))
    filter_number = processor.get("resample", 2)
    if filter_number not in _INTERPOLATIONS:
        raise ConfigError(f"'{place}' resizes by Pillow's filter {filter_number}; give a configuration with --config")
    return InputConfig(
        size=size,
        name="pixel_values",
        resize=resize,
        interpolation=_INTERPOLATIONS[filter_number],
        # Training pads a batch with zeros after normalisation, which are about this grey, and masks them.
        pad_value=_GREY if normalised else 0,
        color="rgb",
        scale=float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0,
        mean=_channels(place, processor, "image_mean") if normalised else (0.0, 0.0, 0.0),
        std=_channels(place, processor, "image_std") if normalised else (1.0, 1.0, 1.0),
    )


def _channels(place: str, processor: dict[str, Any], key: str) -> tuple[float, float, float]:
    try:
        red, green, blue = map(float, processor[key])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"'{place}' gives {key} as {processor.get(key)!r}, expected three numbers; give a configuration "
            "with --config"
        ) from None
    return red, green, blue
