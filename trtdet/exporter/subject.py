"""What is exported: a detector in torch with the configuration of its input and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from trtdet.config import Config
from trtdet.errors import ModelError
from trtdet.exporter.parity import DetectionCheck, OutputCheck, Outputs

Float = NDArray[np.float32]


class Stages(Protocol):
    """How a detector that chooses boxes by itself, before its end, is exported and compared.

    A choice among nearly equal scores is another choice after another rounding, and all that follows differs. So each
    stage of torch is held to the written model on the values that the model's own stage before it gave.
    """

    @property
    def hidden(self) -> tuple[str, ...]:
        """Outputs that are compared and not written."""

    def compared(
        self, subject: Subject, tried: Sequence[Float], found: Sequence[Outputs], tolerance: float
    ) -> tuple[tuple[OutputCheck, ...], DetectionCheck, tuple[str, ...]]:
        """Compares all outputs of the model, on one image each.

        Returns:
            how far numbers are apart, the detections from end to end, and what the user should know.

        Raises:
            ModelError: a stage differs.
        """


@dataclass(frozen=True)
class Subject:
    """A detector in torch.

    Attributes:
        source: as the user named it, for messages.
        reference: the result is compared with it; in evaluation mode, takes float32 (B, 3, H, W) and gives a tensor, a
            tuple or list of tensors, or a dict of tensors, each with the batch first.
        config: size and name of the input, and what the outputs mean.
        traced: computes the same in the form that is exported, with batch normalisation folded where that is known to
            be right; None for the reference itself.
        stages: how a module that chooses by itself is compared; None where its outputs are.
        unordered: the rows of all outputs are in no order that means anything: a choice of the best among nearly equal
            scores made it, and another rounding makes another.
        for_dynamo: what holds while torch's newer exporter reads the module.
    """

    source: str
    reference: nn.Module
    config: Config
    traced: nn.Module | None = None
    unordered: bool = False
    stages: Stages | None = None
    for_dynamo: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def input_name(self) -> str:
        """Of the ONNX model's input."""
        return self.config.input.name or "images"


def tensors(outputs: Any) -> dict[str, Tensor]:
    """The outputs of a module by name; a name that begins with a colon is a position.

    Raises:
        ModelError: there is none, or an output is no tensor.
    """
    if isinstance(outputs, Tensor):
        named: dict[str, Any] = {":0": outputs}
    elif isinstance(outputs, Mapping):
        named = {str(key): value for key, value in outputs.items()}
    elif isinstance(outputs, (tuple, list)):
        named = {f":{index}": value for index, value in enumerate(outputs)}
    else:
        raise ModelError(f"the module gives {type(outputs).__name__}, expected a tensor, a tuple, a list or a dict")
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"output {name.lstrip(':')} of the module is {type(value).__name__}, expected a tensor; "
                "flatten nested outputs in the factory"
            )
    if not named:
        raise ModelError("the module gives no outputs, expected at least one tensor")
    return named
