"""What a detector gives beside boxes: masks, keypoints, rotated boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]

MASK_GRIDS = "masks"
MASK_COEFFICIENTS = "mask_coefficients"
PROTOTYPES = "prototypes"
KEYPOINTS = "keypoints"
ROTATED_BOXES = "rotated_boxes"
ANGLES = "angles"
"""Raw output (B, N, 1) of rotated boxes, in radians."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of R detections or candidates in each of B images; None where the detector gives none.

    Before suppression R is the number of boxes N, after it K, as in the boxes of the same place.
    """

    masks: Float | None = None
    """float32 (B, R, M, M), of two-stage detectors: probabilities 0..1 on a grid over each box."""
    mask_coefficients: Float | None = None
    """float32 (B, R, M): weights of the prototypes."""
    prototypes: Float | None = None
    """float32 (B, M, h, w): logits over the input. They belong to the image, not to a row."""
    keypoints: Float | None = None
    """float32 (B, R, P, 3): x and y in pixels of the input, and a score 0..1."""
    rotated_boxes: Float | None = None
    """float32 (B, R, 5): centre x, centre y, width, height in pixels of the input, and the angle in radians from the x
    axis to the side of the width, positive towards the y axis, which points down."""

    @staticmethod
    def of(outputs: Mapping[str, NDArray[Any]]) -> Parts:
        """The parts among a model's outputs, which have the names of these fields."""
        return Parts(**{field.name: outputs[field.name] for field in fields(Parts) if field.name in outputs})

    def items(self) -> dict[str, Float]:
        """The parts that there are, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def has_masks(self) -> bool:
        return self.masks is not None or self.prototypes is not None

    def image(self, i: int, rows: Any = slice(None)) -> Parts:
        """The parts of image ``i`` alone, without the batch axis; ``rows`` selects detections."""
        return Parts(
            **{name: value[i] if name == PROTOTYPES else value[i][rows] for name, value in self.items().items()}
        )

    def rows(self, rows: Any) -> Parts:
        """Some rows of the parts of one image, which are without the batch axis."""
        return Parts(**{name: value if name == PROTOTYPES else value[rows] for name, value in self.items().items()})

    def padded(self) -> Parts:
        """The parts of one image with a row of zeros after the last."""
        return Parts(
            **{
                name: value if name == PROTOTYPES else np.pad(value, ((0, 1), *((0, 0),) * (value.ndim - 1)))
                for name, value in self.items().items()
            }
        )

    def gathered(self, rows: Sequence[NDArray[np.intp]], room: int) -> Parts:
        """The parts of the chosen rows of each image, padded with zeros to R = ``room``."""
        chosen: dict[str, Float] = {}
        for name, value in self.items().items():
            if name == PROTOTYPES:
                chosen[name] = np.asarray(value, np.float32)
                continue
            chosen[name] = np.zeros((len(rows), room, *value.shape[2:]), np.float32)
            for image, index in enumerate(rows):
                chosen[name][image, : len(index)] = value[image, index]
        return Parts(**chosen)
