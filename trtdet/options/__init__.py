"""The options of all commands: declared in ``fields``, described by the rows in ``rows``."""

from trtdet.options.fields import (
    DEFAULT_IMAGES,
    RANKED_IMAGES,
    BuildOptions,
    CalibrateOptions,
    CalibrationOptions,
    EngineOptions,
    EvalOptions,
    FinishOptions,
    Keep,
    NmsOptions,
    Objective,
    PlanOptions,
    PrepareOptions,
    SensitivityOptions,
    SweepOptions,
    TuneOptions,
)
from trtdet.options.rows import (
    OptionSet,
    Row,
    Stage,
    changed,
    offered,
    path_of,
    rows_of,
    setting,
    spelled,
    stage_keys,
    value_of,
    with_values,
    words,
)

# fmt: off
__all__ = [
    "DEFAULT_IMAGES", "RANKED_IMAGES", "BuildOptions", "CalibrateOptions", "CalibrationOptions", "EngineOptions",
    "EvalOptions", "FinishOptions", "Keep", "NmsOptions", "Objective", "OptionSet", "PlanOptions", "PrepareOptions",
    "Row", "SensitivityOptions", "Stage", "SweepOptions", "TuneOptions", "changed", "offered", "path_of", "rows_of",
    "setting", "spelled", "stage_keys", "value_of", "with_values", "words",
]
# fmt: on
