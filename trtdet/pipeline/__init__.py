"""From a float model to a bundle: a row of stages, each a function from one frozen value to the next.

``options`` says what can be asked for, ``validation`` refuses what cannot be before any image is decoded, ``stages``
holds the stages, ``fingerprint`` derives their keys from the options, ``assembly`` runs the stages, and ``building``
holds the verbs. ``variants`` builds a matrix of variants; ``tuning`` finds the front of a model, ``tuned`` reads and
writes its folder. ``verdict`` compares INT8 with FP16 after a build; ``worth`` is its answer.
"""

from __future__ import annotations

from trtdet.pipeline.building import BuildResult, build, calibrate, sensitivity
from trtdet.pipeline.options import (
    AUTO,
    BuildOptions,
    CalibrationOptions,
    KeepOptions,
    SensitivityOptions,
    TuneOptions,
)
from trtdet.pipeline.stages.bundles import plugin_parts
from trtdet.pipeline.stages.calibrating import HISTOGRAMS, Calibrated, Selection, calibrated, select_images
from trtdet.pipeline.stages.correcting import Prepared, prepared
from trtdet.pipeline.stages.planning import RANKING, Planned, choose_plan, float_plan
from trtdet.pipeline.stages.rewriting import FORMS, Graph, Suppression, host_graph, rewritten, silu_form, suppression

__all__ = [
    "AUTO",
    "FORMS",
    "HISTOGRAMS",
    "RANKING",
    "BuildOptions",
    "BuildResult",
    "Calibrated",
    "CalibrationOptions",
    "Graph",
    "KeepOptions",
    "Planned",
    "Prepared",
    "Selection",
    "SensitivityOptions",
    "Suppression",
    "TuneOptions",
    "build",
    "calibrate",
    "calibrated",
    "choose_plan",
    "float_plan",
    "host_graph",
    "plugin_parts",
    "prepared",
    "rewritten",
    "select_images",
    "sensitivity",
    "silu_form",
    "suppression",
]
