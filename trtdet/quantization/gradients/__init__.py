"""An ONNX model as a differentiable function in torch, and what its detections make of the noise of each activation.

Needs torch, an extra: nothing here is imported before it is asked for, see :func:`available`.
"""

from __future__ import annotations

import importlib.util
import os

NO_TORCH = "torch is not installed: pip install 'trtdet[correct]'"
"""Why there are no gradients where torch is not :func:`available`."""


def available() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def calm_threads() -> None:
    """To be called before torch is loaded, which reads it then: threads that spin while they wait starve all else."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
