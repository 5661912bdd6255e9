"""An ONNX model as a differentiable function in torch, and what its detections make of the noise of each activation.

Needs torch, an extra: nothing here is imported before it is asked for, see :func:`available`.
"""

from __future__ import annotations

import importlib.util


def available() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None
