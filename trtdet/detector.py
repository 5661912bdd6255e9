"""A bundle, or a model with its configuration, as one thing that turns images into detections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends import OnnxRunner
from trtdet.bundle import Bundle
from trtdet.config import Config, InputConfig, NmsConfig, Where
from trtdet.detections import Detections, non_max_suppression
from trtdet.errors import ConfigError
from trtdet.passes import Options, load_model, own_nms, rewrite


@dataclass(frozen=True)
class Detector:
    """What runs, and how to feed it and read it.

    Attributes:
        file: the ONNX file that is run.
        runner: runs it.
        where: what does the suppression.
        input: the pre-processing.
        nms: the thresholds.
        logits: with ``host``, whether the model's scores still lack their sigmoid.
        classes: names by class index.
    """

    file: Path
    runner: OnnxRunner
    where: Where
    input: InputConfig
    nms: NmsConfig
    logits: bool
    classes: tuple[str, ...]

    @staticmethod
    def open(target: Path, config: Config | None = None, nms: Where | Literal["auto"] = "auto") -> Detector:
        """Opens a bundle's folder, or an ONNX file together with a configuration.

        A bundle's engine needs the GPU it was built for; the ONNX model that the engine was built from computes the
        same on the CPU, so that is what runs.

        Args:
            target: a bundle's folder or an ONNX file.
            config: needed for an ONNX file; a bundle carries its own.
            nms: for an ONNX file, what is to suppress; ``auto`` leaves the model's own suppression as it is, and is
                ``host`` where it has none.

        Raises:
            BundleError, ModelError, ConfigError, BackendError: it cannot be opened or run.
        """
        if target.is_dir():
            if config is not None:
                raise ConfigError(f"'{target}' is a bundle, which carries its own configuration; leave --config out")
            return _open_bundle(Bundle(target), nms)
        if config is None:
            raise ConfigError(
                f"'{target}' is a model, which needs --config: a YAML file or a shipped name such as yolox"
            )
        source = load_model(target, allow_quantized=True)
        own = own_nms(source, config) if nms == "auto" else None
        where: Where = own.kind if own else "host" if nms == "auto" else nms
        done = rewrite(source, Options(config, where, keep_own=own is not None))
        return Detector.running(done.model, done.config, where, target)

    @staticmethod
    def running(model: onnx.ModelProto, config: Config, where: Where, file: Path = Path("model")) -> Detector:
        """A rewritten model that is at hand.

        Args:
            model: with the outputs of ``where``.
            config: its configuration.
            where: what does the suppression.
            file: what it is called.
        """
        runner, logits = OnnxRunner(model), config.suppresses_logits
        return Detector(file, runner, where, config.input, config.nms, logits, config.classes)

    def __call__(self, images: NDArray[np.float32]) -> Detections:
        """Detects on one batch.

        Args:
            images: float32 (B, 3, H, W), pre-processed as ``input`` says.
        """
        return self.suppressed(self.runner(images), self.nms)

    def suppressed(self, outputs: Mapping[str, NDArray[Any]], nms: NmsConfig) -> Detections:
        """The detections in what the model gave; where it suppresses itself, ``nms`` was in the graph already."""
        if self.where == "host":
            return non_max_suppression(outputs["boxes"], outputs["scores"], nms, logits=self.logits)
        return Detections(outputs["num_dets"], outputs["boxes"], outputs["scores"], outputs["classes"])


def _open_bundle(bundle: Bundle, nms: str) -> Detector:
    manifest = bundle.manifest
    where = manifest.nms.where
    if nms not in ("auto", where):
        raise ConfigError(
            f"bundle '{bundle.path}' was built with --nms {where}, not {nms}; build it again or leave --nms out"
        )
    thresholds = manifest.nms.model_dump(exclude={"where", "scores", "own"})
    file = bundle.model
    return Detector(
        file,
        OnnxRunner(file.read_bytes()),
        where,
        manifest.input.preprocess,
        NmsConfig.model_validate(thresholds),
        manifest.nms.scores == "logits",
        manifest.model.classes,
    )
