"""The stages of a build, each a function from one frozen value to the next.

    options -> validation -> rewriting -> calibrating -> correcting -> planning -> network -> engine -> bundle

| module | takes | gives |
|---|---|---|
| ``rewriting`` | a float model | ``Graph``: as the passes leave it, with placement |
| ``calibrating`` | the graph, images | ``Calibrated``: histograms and ranges |
| ``correcting`` | the ranges | ``Prepared``: all that INT8 needs |
| ``planning`` | what is prepared | ``Planned``: a precision for each convolution |
| ``networks`` | the plan | ``Network``: what the builder is given |
| ``engines`` | the network | ``Engine``: built and audited |
| ``bundles`` | the engine | the finished folder |
"""
