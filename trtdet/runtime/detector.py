"""A bundle, or a model with its configuration, as one thing that turns images into detections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends import EngineFacts, OnnxRunner, Runner, obstacle, open_engine
from trtdet.bundle import Bundle
from trtdet.config import Config, InputConfig, NmsConfig, NmsMode
from trtdet.detection.suppression import Detections, non_max_suppression
from trtdet.errors import BackendError, ConfigError
from trtdet.passes import Options, embedded_nms, load_model, rewrite

On = Literal["auto", "engine", "onnxruntime"]
"""What a bundle is run on: its engine where that can be, only its engine, or its ONNX model."""


@dataclass(frozen=True)
class Detector:
    """What runs, and how to feed it and read it.

    Attributes:
        file: the engine or the ONNX file that is run.
        runner: runs it; its ``run_info`` says on what, and why not on the engine.
        where: what does the suppression.
        input: the pre-processing.
        nms: the thresholds.
        logits: with ``host``, whether the model's scores still lack their sigmoid.
        classes: names by class index.
        batch: how many images it is best given at a time.
    """

    file: Path
    runner: Runner
    where: NmsMode
    input: InputConfig
    nms: NmsConfig
    logits: bool
    classes: tuple[str, ...]
    batch: int = 1

    @staticmethod
    def open(
        target: Path, config: Config | None = None, nms: NmsMode | Literal["auto"] = "auto", on: On = "auto"
    ) -> Detector:
        """Opens a bundle's folder, or an ONNX file together with a configuration.

        A bundle's engine needs a GPU it was built for and the library it was built with; the ONNX model that the engine
        was built from computes the same on the CPU.

        Args:
            target: a bundle's folder or an ONNX file.
            config: needed for an ONNX file; a bundle carries its own.
            nms: for an ONNX file, what is to suppress; ``auto`` leaves the model's own suppression as it is, and is
                ``host`` where it has none.
            on: for a bundle, what is run: ``auto`` is the engine where it can be run, else the model, and
                ``runner.run_info`` says why. An engine that can be run and then fails is an error, never the model.

        Raises:
            BundleError, ModelError, ConfigError, BackendError: it cannot be opened or run.
        """
        if target.is_dir():
            if config is not None:
                raise ConfigError(f"'{target}' is a bundle, which carries its own configuration; leave --config out")
            return _open_bundle(Bundle(target), nms, on)
        if on == "engine":
            raise ConfigError(f"'{target}' is a model, which has no engine; give a bundle, or leave --runtime out")
        if config is None:
            raise ConfigError(
                f"'{target}' is a model, which needs --config: a YAML file or a shipped name such as yolox"
            )
        source = load_model(target, allow_quantized=True)
        own = embedded_nms(source, config) if nms == "auto" else None
        where: NmsMode = own.kind if own else "host" if nms == "auto" else nms
        done = rewrite(source, Options(config, where, keep_own=own is not None))
        return Detector.running(done.model, done.config, where, target)

    @staticmethod
    def running(
        model: onnx.ModelProto | Runner, config: Config, where: NmsMode, file: Path = Path("model")
    ) -> Detector:
        """A rewritten model that is at hand, or what runs it.

        Args:
            model: with the outputs of ``where``.
            config: its configuration.
            where: what does the suppression.
            file: what it is called.
        """
        runner = OnnxRunner(model) if isinstance(model, onnx.ModelProto) else model
        logits, batch = config.suppresses_logits, runner.batch or 1
        return Detector(file, runner, where, config.input, config.nms, logits, config.classes, batch)

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


def _open_bundle(bundle: Bundle, nms: str, on: On) -> Detector:
    manifest = bundle.manifest
    where = manifest.nms.where
    if nms not in ("auto", where):
        raise ConfigError(
            f"bundle '{bundle.path}' was built with --nms {where}, not {nms}; build it again or leave --nms out"
        )
    thresholds = manifest.nms.model_dump(exclude={"where", "scores", "own"})
    file, runner = _runner(bundle, on)
    return Detector(
        file,
        runner,
        where,
        manifest.input.preprocess,
        NmsConfig.model_validate(thresholds),
        manifest.nms.scores == "logits",
        manifest.model.classes,
        # Of a dynamic batch, an engine is fastest at what it was optimised for; for the CPU it makes no difference.
        runner.batch or (manifest.input.shape.opt[0] if file == bundle.engine else 1),
    )


def _runner(bundle: Bundle, on: On) -> tuple[Path, Runner]:
    """What runs a bundle, and the file of it that is run."""
    engine = bundle.engine
    if engine is None and on == "engine":
        raise BackendError(f"bundle '{bundle.path}' has no engine; build it with --backend tensorrt or tensorrt-rtx")
    reason = ""
    if engine is not None and on != "onnxruntime":
        facts = EngineFacts.of(bundle)
        reason = obstacle(facts)
        if not reason:
            return engine, open_engine(engine.read_bytes(), facts)
        if on == "engine":
            raise BackendError(f"the engine of bundle '{bundle.path}' cannot be run here, as {reason}")
    if bundle.manifest.quantization.mode == "implicit":
        raise BackendError(
            f"bundle '{bundle.path}' is quantised implicitly: INT8 is in its engine alone, which "
            + (f"cannot be run here, as {reason}" if reason else "is what --runtime onnxruntime leaves out")
            + "; with --quantization explicit the model has it too"
        )
    runner = OnnxRunner(bundle.model.read_bytes())
    if reason:
        runner.run_info = replace(runner.run_info, fallback_reason=reason)
    return bundle.model, runner
