"""What an exported model gives."""

from pathlib import Path
from typing import Any

import onnxruntime as ort


def run(path: Path, outputs: list[str] | None = None, **inputs: Any) -> list[Any]:
    """The outputs of a model in onnxruntime, all of them or those of these names."""
    return list(ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(outputs, inputs))
