"""INT8 networks as differentiable functions in torch, for learning.

Needs torch, an extra, which is imported on first use, see :func:`available`.
"""

from __future__ import annotations

import importlib.util
import os

NO_TORCH = "torch is not installed: pip install 'trtdet[correct]'"
"""The reason for having no gradients if torch is not :func:`available`."""


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def calm_threads() -> None:
    """Stops idle threads from spinning, which slows down all others; torch reads the setting when it is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
