"""From a float model to a bundle: graph -> ranges -> corrections -> plan -> network -> engine -> bundle.

| module | result |
|---|---|
| ``job``, ``validation``, ``variants`` | a checked build: wrong options fail before an image is decoded |
| ``request`` | whether a bundle is what the same command would build, before the model is parsed |
| ``selection`` | the calibration images |
| ``graph`` | the rewritten model with its Q/DQ placement |
| ``ranges`` | histograms of the calibration images, and the ranges of a rule |
| ``corrections``, ``half`` | corrections that pass a test on other images; nodes whose values exceed FP16 |
| ``default_plan`` | the fastest plan by estimates, before images are run; FP16 alone where nothing gains |
| ``plan``, ``costs`` | a precision for each convolution |
| ``engine`` | the builder's input, and the engine with its audit |
| ``bundle`` | the finished folder |
| ``assembly`` | all these steps in order |
| ``comparison`` | INT8 compared with FP16, after a build |
| ``forecasts`` | the stages of a build and their estimated time |
| ``verbs`` | the public functions |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtdet import importer

if TYPE_CHECKING:
    from trtdet.building.verbs import BuildResult, build, calibrate, sensitivity

__all__ = ["BuildResult", "build", "calibrate", "sensitivity"]

__getattr__ = importer(__name__, {"verbs": "BuildResult build calibrate sensitivity"})
