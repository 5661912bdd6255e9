"""An ensemble of a model repository run without Triton: the packaged python models with a stand-in for the python
backend's module, and onnxruntime for the engine. Every tensor is held to the configurations as Triton holds it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2

Array = NDArray[Any]
TYPES = {"TYPE_STRING": object, "TYPE_UINT8": np.uint8, "TYPE_INT32": np.int32, "TYPE_FP16": np.float16}
TYPES |= {"TYPE_FP32": np.float32, "TYPE_FP64": np.float64}


class RefusedError(Exception):
    """What a client would get in place of an answer."""


def read_config(folder: Path) -> Any:
    """The configuration of a model, by Triton's published message."""
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


class Ensemble:
    """The model that clients call.

    Args:
        repository: the folder.
        name: of the ensemble.
        engine: runs a batch, by the names of the engine's tensors.
    """

    def __init__(self, repository: Path, name: str, engine: Callable[[Array], Mapping[str, Array]]) -> None:
        self._repository, self._engine = repository, engine
        self.config = read_config(repository / name)
        self._configs = {
            step.model_name: read_config(repository / step.model_name) for step in self.config.ensemble_scheduling.step
        }
        self._models = {
            model: load(repository / model, config)
            for model, config in self._configs.items()
            if config.backend == "python"
        }

    def __call__(self, **tensors: Array) -> dict[str, Array]:
        check(tensors, self.config, self.config.input)
        for step in self.config.ensemble_scheduling.step:
            config = self._configs[step.model_name]
            given = {key: tensors[value] for key, value in step.input_map.items()}
            check(given, config, config.input)
            if step.model_name in self._models:
                found = execute(self._models[step.model_name], given)
            else:
                (images,) = given.values()
                found = dict(self._engine(images))
            check(found, config, config.output)
            tensors |= {value: found[key] for key, value in step.output_map.items()}
        answer = {output.name: tensors[output.name] for output in self.config.output}
        check(answer, self.config, self.config.output)
        return answer


def check(tensors: Mapping[str, Array], config: Any, declared: Any) -> None:
    """Names, types and dimensions as configured."""
    assert set(tensors) == {one.name for one in declared}, (config.name, set(tensors))
    for one in declared:
        array = tensors[one.name]
        kind = model_config_pb2.DataType.Name(one.data_type)
        assert array.dtype == TYPES[kind], (config.name, one.name, array.dtype, kind)
        dims = [-1, *one.dims] if config.max_batch_size else list(one.dims)
        fits = len(dims) == array.ndim and all(a in (-1, b) for a, b in zip(dims, array.shape, strict=True))
        if not fits or (config.max_batch_size and len(array) > config.max_batch_size):
            raise RefusedError(f"{config.name}: '{one.name}' is {array.shape}, expected {dims}")


def load(folder: Path, config: Any) -> Any:
    """The python model of a folder, initialised as the python backend does it."""
    stand_in = str(Path(__file__).resolve().parent)
    if stand_in not in sys.path:
        sys.path.append(stand_in)
    spec = importlib.util.spec_from_file_location(f"served_{folder.name}", folder / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize(
        {
            "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
            "model_repository": str(folder),
            "model_version": "1",
        }
    )
    return model


def execute(model: Any, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """One request."""
    import triton_python_backend_utils as pb_utils

    request = pb_utils.InferenceRequest({name: pb_utils.Tensor(name, array) for name, array in tensors.items()})
    (response,) = model.execute([request])
    if response.error is not None:
        raise RefusedError(response.error.message)
    return {tensor.name: tensor.as_numpy() for tensor in response.output_tensors}
