"""Naming the first layer of an engine that departs from its model."""

import json
from typing import Any

import numpy as np
import onnx
import pytest
from models import SILUS, SMALL_MODEL
from written_networks import parsed

from trtdet.audit.agreement import agreement, compare_layers, watched_tensors, with_outputs
from trtdet.backends import OnnxRunner, RunInfo
from trtdet.bundle import Bundle
from trtdet.demo.shapes import generate
from trtdet.errors import BackendError, ConfigError

pytest.importorskip("polygraphy", reason="Polygraphy is not installed: pip install 'trtdet[trt]'")


NET = """<ir_version: 8, opset_import: ["" : 13]>
net (float[1,3,8,8] x) => (float[1,4,8,8] y) {
    a = Conv<pads = [1, 1, 1, 1]>(x, wa) b = Relu(a) c = Conv<pads = [1, 1, 1, 1]>(b, wb) d = Relu(c)
    q = QuantizeLinear(d, s, z) e = DequantizeLinear(q, s, z) y = Conv<pads = [1, 1, 1, 1]>(e, wc) }"""
LAST, SECOND = "Conv_6", "Relu_3"


def net(scale: float = 1.0) -> onnx.ModelProto:
    """Three convolutions in a row, the second's weights scaled."""
    draw = np.random.default_rng(0)
    shapes = {"wa": (4, 3, 3, 3), "wb": (4, 4, 3, 3), "wc": (4, 4, 3, 3)}
    values: dict[str, Any] = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    values["wb"] *= np.float32(scale)
    return parsed(NET, {**values, "s": np.float32(0.2), "z": np.int8(0)})


def images(count: int = 2) -> list[np.ndarray]:
    return [np.random.default_rng(index).normal(size=(1, 3, 8, 8)).astype(np.float32) for index in range(count)]


def exposed(model: onnx.ModelProto) -> OnnxRunner:
    return OnnxRunner(with_outputs(model, watched_tensors(model)))


def test_what_convolutions_read_and_what_the_model_gives_is_watched():
    assert watched_tensors(net()) == {"b": "Relu_1", "d": SECOND, "y": LAST}


def test_of_a_suppression_in_the_graph_what_it_reads_is_watched():
    nodes = [
        onnx.helper.make_node("Relu", ["x"], ["boxes_all"], "decode"),
        onnx.helper.make_node("Relu", ["x"], ["scores_all"], "score"),
        onnx.helper.make_node("Some", ["boxes_all", "scores_all"], ["num_dets", "boxes", "scores", "classes"], "nms"),
    ]
    outputs = [onnx.helper.make_tensor_value_info(name, 1, [1]) for name in ("num_dets", "boxes", "scores", "classes")]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], outputs))
    assert watched_tensors(model) == {"boxes_all": "decode", "scores_all": "score"}


def test_two_that_are_the_same_agree():
    found = agreement(exposed(net()), exposed(net()), watched_tensors(net()), images(), 20.0)
    assert (found.first, found.images, [one.snr for one in found.tensors]) == (None, 2, [np.inf] * 3)
    assert str(found).startswith("no layer departs: 'Relu_1' is the farthest with inf dB (3 tensors against onnxrunt")
    assert found.as_dict()["tensors"][0]["snr"] is None
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize(("scale", "expected"), [(1.01, 40.0), (1.1, 20.0), (2.0, 0.0)])
def test_the_first_that_departs_is_named_with_its_ratio(scale, expected):
    """An amplitude that is off by a hundredth is a noise of 40 dB under the signal, by a tenth 20 dB."""
    limit = expected + 1
    found = agreement(exposed(net(scale)), exposed(net()), watched_tensors(net()), images(), limit)
    assert found.first is not None
    assert (found.first.node, found.first.tensor) == (SECOND, "d")
    assert found.first.snr == pytest.approx(expected, abs=0.01)
    assert [one.departs for one in found.tensors][:2] == [False, True]
    assert f"'{SECOND}' is the first layer that departs: 'd' has {expected:.1f} dB, under {limit:g}" in str(found)
    assert f"| {SECOND} | d | " in found.table().markdown()
    assert agreement(exposed(net(scale)), exposed(net()), watched_tensors(net()), images(), expected - 1).first is None


def test_what_is_no_number_departs():
    runner: Any = exposed(net())

    class Broken:
        run_info = RunInfo("CPU", "a test")

        def __call__(self, batch: np.ndarray) -> dict[str, np.ndarray]:
            given: dict[str, np.ndarray] = runner(batch)
            return {**given, "d": np.full_like(given["d"], np.nan)}

    found = agreement(Broken(), runner, watched_tensors(net()), images(1), 20.0)  # type: ignore[arg-type]
    assert found.first is not None
    assert found.first.node == SECOND
    json.dumps(found.as_dict(), allow_nan=False)


def test_without_images_there_is_nothing_to_say():
    with pytest.raises(ConfigError, match="no image to compare on"):
        agreement(exposed(net()), exposed(net()), watched_tensors(net()), [], 20.0)


BUILT = ["build", SMALL_MODEL, "--config", "shapes", "--num-images", 4, "--effort", "none", "--silu", "keep"]
BUILT += ["--guard", "off", "--int8-all"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return generate(tmp_path_factory.mktemp("shapes"), "calibration", 6).images


@pytest.mark.slow
def test_an_engine_with_other_weights_than_its_model_is_found_out(machine, pictures, tmp_path):
    """The stand-in builds what the bundle's model says, so the model is altered behind the engine's back: it is
    onnxruntime that is given another one."""
    place = tmp_path / "b"
    built = machine.trtdet(*BUILT, "--images", pictures, "-o", place, "--backend", "tensorrt", "--nms", "host")
    assert built.code == 0, built.err
    agreed = machine.trtdet("audit", place, "--compare", "--images", pictures, "--num-images", 2, "--json")
    assert agreed.code == 0, agreed.err
    compare = agreed.json["compare"]
    assert (compare["first"], compare["limit"], compare["images"]) == (None, 20.0, 2)
    assert len(compare["tensors"]) > SILUS
    assert compare["ran_on"].startswith("TensorRT 10.9.0 (")
    words = machine.python(DEPARTING, place, pictures).out
    # The first convolution has this name; what reads its activation comes after.
    assert "is the first layer that departs" in words
    assert "/stem/" in words.split("is the first")[0]


DEPARTING = """
import sys
from pathlib import Path
import numpy as np
import onnx
import trtdet.audit.agreement as agreement
from trtdet.bundle import Bundle

whole = agreement.OnnxRunner

def altered(model):
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    first = next(node for node in changed.graph.node if node.op_type == "Conv")
    bias = next(one for one in changed.graph.initializer if one.name == first.input[2])
    value = onnx.numpy_helper.to_array(bias) + np.float32(3)
    bias.CopyFrom(onnx.numpy_helper.from_array(value, bias.name))
    return whole(changed)

agreement.OnnxRunner = altered
print(agreement.compare_layers(Bundle(Path(sys.argv[1])), Path(sys.argv[2]), 2))
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare"], "--compare and --images belong together"),
        (["--images", "x"], "--compare and --images belong together"),
        (["--limit", "20"], "--limit is of the layer-by-layer comparison; give --compare and --images as well"),
        (["--measure", "--times", "x.json"], "--measure and --times both give"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, arguments, message, capfd):
    from trtdet.cli import main

    assert main(["audit", str(tmp_path), *arguments]) == 1
    assert message in capfd.readouterr().err


def test_a_bundle_without_an_engine_or_a_device_says_so(tmp_path, pictures, machine):
    from trtdet.cli import main

    arguments = [*BUILT, "--images", pictures, "-o", tmp_path / "a", "--backend", "onnxruntime"]
    assert main([str(argument) for argument in arguments]) == 0
    with pytest.raises(BackendError, match="has no engine to compare; build it with --backend tensorrt"):
        compare_layers(Bundle(tmp_path / "a"), pictures)
    built = machine.trtdet(*BUILT, "--images", pictures, "-o", tmp_path / "b", "--backend", "tensorrt")
    assert built.code == 0, built.err
    refused = machine.trtdet("audit", tmp_path / "b", "--compare", "--images", pictures, driver=False)
    assert "cannot be compared here, as this machine has no CUDA driver" in refused.message
