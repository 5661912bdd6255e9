"""What Triton's python backend gives a model, as far as the packaged models use it (python_backend README)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class TritonError:
    INTERNAL = 1
    INVALID_ARG = 3

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self.message, self.code = message, code


class Tensor:
    def __init__(self, name: str, array: NDArray[np.generic]) -> None:
        self.name, self._array = name, array

    def as_numpy(self) -> NDArray[np.generic]:
        return self._array


@dataclass
class InferenceRequest:
    tensors: dict[str, Tensor]


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return request.tensors.get(name)
