"""The plugins in TensorRT 8.6.0's registry: NVIDIA's EfficientNMS and trtdet's activations."""

import struct
import subprocess
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.backends import cuda
from trtdet.config import load_config
from trtdet.detection.plugin_nms import EfficientNms
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes import Options, load_model, rewrite
from trtdet.passes.plugin_ops import INT8, NAMESPACE, PLUGIN_ACTIVATIONS, attributes

pytestmark = pytest.mark.tensorrt86


def types(creator: Any) -> dict[str, str]:
    return {field.name: field.type.name for field in creator.field_names}


def collection(trt: Any, values: dict[str, Any]) -> tuple[Any, list[np.ndarray]]:
    """Attributes as the parser gives them, and the arrays that must live as long."""
    arrays = {}
    for name, value in values.items():
        one = np.atleast_1d(np.asarray(value))
        arrays[name] = one.astype(np.float32 if one.dtype.kind == "f" else np.int32)
    kinds = {np.dtype(np.float32): trt.PluginFieldType.FLOAT32, np.dtype(np.int32): trt.PluginFieldType.INT32}
    made = [trt.PluginField(name, array, kinds[array.dtype]) for name, array in arrays.items()]
    return trt.PluginFieldCollection(made), list(arrays.values())


def create(trt: Any, creator: Any, **values: Any) -> Any:
    given, kept = collection(trt, values)
    made = creator.create_plugin("node", given)
    assert all(len(array) for array in kept)
    return made


def state(plugin: Any) -> bytes:
    return bytes(plugin.serialize())


@pytest.fixture(scope="module")
def efficient(trt, log):
    assert trt.init_libnvinfer_plugins(log, "")
    return trt.get_plugin_registry().get_plugin_creator("EfficientNMS_TRT", "1", "")


@pytest.fixture(scope="module")
def written():
    """The attributes of the node as they stand in a model that trtdet rewrote."""
    graph = rewrite(load_model(SHAPES_MODEL), Options(load_config("shapes"), "efficient")).model.graph
    (node,) = (node for node in graph.node if node.op_type == "EfficientNMS_TRT")
    return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}


def test_efficient_nms_has_the_attributes_that_trtdet_writes_but_class_agnostic(efficient, written):
    names = {"float": "FLOAT32", "int": "INT32"}
    ours = {field.name: names[str(field.type)] for field in fields(EfficientNms)}
    assert set(written) == {*ours, "plugin_version"} and written["plugin_version"] == b"1"
    # It came with 8.6.1: 8.6.0 suppresses class by class whatever a node says.
    assert types(efficient) == {name: kind for name, kind in ours.items() if name != "class_agnostic"}


def test_efficient_nms_is_made_from_what_trtdet_writes_and_survives_its_own_state(trt, efficient, written):
    values = {name: value for name, value in written.items() if name != "plugin_version"}
    plugin = create(trt, efficient, **values)
    assert (plugin.plugin_type, plugin.plugin_version, plugin.num_outputs) == ("EfficientNMS_TRT", "1", 4)
    # As in the plugin's own parameters; between them lies padding that nothing sets.
    expected = (
        *(np.float32(values[name]) for name in ("iou_threshold", "score_threshold")),
        *(values[name] for name in ("max_output_boxes", "background_class", "score_activation", "box_coding")),
    )
    again = efficient.deserialize_plugin("node", state(plugin))
    for one in (plugin, again):
        assert struct.unpack_from("<ffi8xi?3xi", state(one)) == expected
        assert one.serialization_size == len(state(one)) == 72


def test_class_agnostic_changes_nothing_in_8_6_0(trt, efficient, written):
    values = {name: value for name, value in written.items() if name != "plugin_version"}

    def varying(name: str, *settings: int) -> int:
        """How many bytes of the state hang on an attribute, those that change by themselves left out."""
        states = [[state(create(trt, efficient, **{**values, name: one})) for _ in range(8)] for one in settings]
        fixed = [at for at in range(72) if all(len({one[at] for one in same}) == 1 for same in states)]
        return sum(len({same[0][at] for same in states}) > 1 for at in fixed)

    assert varying("class_agnostic", 0, 1) == 0
    assert varying("box_coding", 0, 1) == 1


@pytest.fixture(scope="module")
def creators(trt, library):
    registry = trt.get_plugin_registry()
    assert registry.load_library(str(library)) is not None
    return {name: registry.get_plugin_creator(name, "1", NAMESPACE) for name in PLUGIN_ACTIVATIONS}


@pytest.mark.parametrize("name", PLUGIN_ACTIVATIONS)
def test_the_registry_finds_an_activation_with_its_attributes(creators, name):
    creator = creators[name]
    assert (creator.name, creator.plugin_version, creator.plugin_namespace) == (name, "1", NAMESPACE)
    written = [one for one in attributes() if not one.startswith("plugin_")]
    assert types(creator) == {one: "INT32" if one == "output_type" else "FLOAT32" for one in written}


@pytest.mark.parametrize("name", PLUGIN_ACTIVATIONS)
def test_an_activation_is_made_from_its_attributes_and_survives_its_own_state(trt, creators, name):
    values = {"output_type": INT8, "input_scale": [0.5], "factor": [1.0, 2.0, 3.0], "offset": [0.0]}
    plugin = create(trt, creators[name], **values)
    assert (plugin.plugin_type, plugin.plugin_version, plugin.plugin_namespace) == (name, "1", NAMESPACE)
    assert plugin.num_outputs == 1
    again = creators[name].deserialize_plugin("node", state(plugin))
    assert state(again) == state(plugin)
    assert struct.unpack_from("<i", state(plugin), 12) == (INT8,)
    assert np.frombuffer(state(plugin), np.float32)[-5:].tolist() == [0.5, 1.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize("name", PLUGIN_ACTIVATIONS)
def test_wrong_attributes_and_a_cut_state_are_refused_with_a_reason(trt, creators, name, capfd):
    assert create(trt, creators[name], input_scale=[0.0]) is None
    assert (
        f"{NAMESPACE}::{name}: input_scale holds 0.000000; every value must be finite and above 0"
        in capfd.readouterr().err
    )
    whole = state(create(trt, creators[name], factor=[1.0, 2.0]))
    assert creators[name].deserialize_plugin("node", whole[:-4]) is None
    assert "it was cut or altered: build it again" in capfd.readouterr().err


@pytest.mark.skipif(bool(cuda.devices()), reason="this machine has a CUDA device")
def test_an_activation_without_a_device_says_so(trt, creators, capfd):
    assert create(trt, creators["TRT_SiLU"], output_type=INT8).initialize() != 0
    assert "trtdet::TRT_SiLU: finding the current device failed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("first", "known"), [("", False), ("ctypes.CDLL('libnvinfer.so.8', ctypes.RTLD_GLOBAL)", True)]
)
def test_opening_the_library_registers_it_only_where_libnvinfer_is_open_to_all(library, first, known):
    """Python loads the bindings, and libnvinfer with them, for themselves alone; the plugin library looks for it among
    what is open to all. ``load_library`` of the registry needs none of that."""
    program = (
        f"import ctypes, tensorrt as trt\n{first}\n"
        f"ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)\n"
        f"print(trt.get_plugin_registry().get_plugin_creator('TRT_SiLU', '1', {NAMESPACE!r}) is not None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{known}\n", done.stderr
