"""The stand-in for TensorRT has no name that the real library lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine_programs import needs_rtx
from standin.machine import FOLDER


def surface(version: str) -> dict[str, list[str]]:
    """The public names on each public class of the stand-in; with "rtx", as TensorRT-RTX."""
    program = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
module = importlib.import_module(sys.argv[2])
classes = {name: one for name, one in vars(module).items() if isinstance(one, type) and not name.startswith("_")}
own = lambda one: [*vars(one), *getattr(one, "__members__", ())]
print(json.dumps({name: sorted({key for key in own(one) if not key.startswith("_")}) for name, one in classes.items()
                  if one.__module__ == sys.argv[2]}))
"""
    environment = {**os.environ, "CUDA_STANDIN_TENSORRT": version}
    where = (FOLDER / "with_rtx", "tensorrt_rtx") if version == "rtx" else (FOLDER, "tensorrt")
    command = [sys.executable, "-c", program, *map(str, where)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


ONLY_BEFORE_11 = {
    # The calibrators went in 11.
    *(f"IInt8{rule}Calibrator{number}" for rule in ("", "Entropy", "Legacy", "MinMax") for number in ("", "2")),
    *("IBuilderConfig.int8_calibrator", "IBuilderConfig.set_calibration_profile"),
    # Networks are always strongly typed from 11 on.
    *(f"BuilderFlag.{name}" for name in ("FP16", "INT8", "STRICT_TYPES")),
    *(f"BuilderFlag.{verb}_PRECISION_CONSTRAINTS" for verb in ("OBEY", "PREFER")),
    *("ILayer.precision", "ILayer.precision_is_set", "ILayer.set_output_type"),
    # Batches are always explicit, and profiles always shared, from 11 on.
    *("NetworkDefinitionCreationFlag.EXPLICIT_BATCH", "PreviewFeature.PROFILE_SHARING_0806"),
}


@needs_rtx
@pytest.mark.parametrize("version", ["8.6.0", "10.9.0", "11.1.0", "rtx"])
def test_the_stand_in_has_no_name_that_the_real_library_lacks(version):
    import tensorrt_rtx

    found = surface(version)
    assert {"Runtime", "ICudaEngine", "IExecutionContext", "IBuilderConfig"} < found.keys()
    names = {
        name if not hasattr(tensorrt_rtx, name) else f"{name}.{key}"
        for name, keys in found.items()
        for key in keys
        if not hasattr(getattr(tensorrt_rtx, name, None), key)
    }
    allowed = set() if version in ("11.1.0", "rtx") else ONLY_BEFORE_11
    assert sorted(names - allowed) == []
