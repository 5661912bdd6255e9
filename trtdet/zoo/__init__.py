"""Network definitions, and one small trained detector that ships with trtdet.

This module imports no torch; ``trtdet.zoo.yolox`` and ``trtdet.zoo.train_shapes`` do.
"""

from __future__ import annotations

from pathlib import Path

SHAPES_MODEL = Path(__file__).with_name("shapes.onnx")
"""The shapes detector: configuration ``shapes``; ``shapes.json`` beside it says how it was made and what it scores."""
