"""Grid cells of the levels of a head, and the points that boxes are decoded around."""

from __future__ import annotations

import numpy as np

from trtdet.config import Config
from trtdet.detection.parts import Float


def grid_shapes(config: Config) -> list[tuple[int, int]]:
    """Rows and columns of the grid of each stride."""
    return [(-(-config.input.height // s), -(-config.input.width // s)) for s in config.head.strides]


def anchor_points(config: Config, offset: float) -> tuple[Float, Float]:
    """Points float32 (N, 2), x y in pixels, and strides float32 (N, 1), level by level, row by row.

    ``offset`` is the distance of a point from the corner of its cell, in strides.
    """
    points, strides = [], []
    for (rows, columns), stride in zip(grid_shapes(config), config.head.strides, strict=True):
        y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
        cells = np.stack([x, y], axis=-1).reshape(-1, 2).astype(np.float32)
        points.append((cells + np.float32(offset)) * np.float32(stride))
        strides.append(np.full((len(cells), 1), stride, np.float32))
    return np.concatenate(points), np.concatenate(strides)
