"""ONNX models as differentiable functions in torch, and the effect of each activation's noise on the detections.

Needs torch, an extra; nothing imports it before use, see :func:`available`.
"""

from __future__ import annotations

import importlib.util
import os

NO_TORCH = "torch is not installed: pip install 'trtdet[correct]'"
"""The reason for having no gradients if torch is not :func:`available`."""


def available() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def calm_threads() -> None:
    """Call this before torch is loaded, which reads it then: spinning threads would slow down all others."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
