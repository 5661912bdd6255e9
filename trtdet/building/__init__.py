"""From a float model to a bundle: graph -> ranges -> corrections -> plan -> network -> engine -> bundle.

| module | gives |
|---|---|
| ``job``, ``validation``, ``variants`` | a checked build: wrong options are refused before an image is decoded |
| ``graph`` | the model as the passes leave it, with its Q/DQ placement |
| ``ranges`` | histograms of the calibration images, and the ranges of a rule |
| ``corrections``, ``half`` | corrections that hold on images held back, and what FP16 holds of the model's values |
| ``plan``, ``costs`` | a precision for each convolution |
| ``engine`` | the network that the builder is given, and the engine with its audit |
| ``bundle`` | the finished folder |
| ``assembly`` | these steps in a row |
| ``comparison`` | INT8 against FP16, after a build |
| ``forecasts`` | the stages to come and how long they take |
| ``verbs`` | the public functions |
"""

from trtdet.building.verbs import BuildResult, build, calibrate, sensitivity

__all__ = ["BuildResult", "build", "calibrate", "sensitivity"]
