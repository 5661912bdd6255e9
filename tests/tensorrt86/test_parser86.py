"""What trtdet writes for TensorRT 8.6, read by the ONNX parser of 8.6.0 itself."""

import os
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx_parser import Layer, Parsed

from trtdet.backends import BuildRequest, Capabilities, cuda
from trtdet.backends.tensorrt import build_process, messages
from trtdet.backends.tensorrt import builder as tensorrt
from trtdet.backends.tensorrt.builder import TensorRT
from trtdet.backends.tensorrt.opsets import missing_operators
from trtdet.building import build
from trtdet.calibration import cache as calibration_cache
from trtdet.config import Config, load_config
from trtdet.demo import shapes
from trtdet.errors import BackendError
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions, CalibrationOptions, NmsOptions, PlanOptions, changed
from trtdet.passes import plugin_ops
from trtdet.passes.opset.lowering import lower
from trtdet.progress import Progress, silent
from trtdet.quantization import DataFlow

pytestmark = pytest.mark.tensorrt86

CONFIGS = {"shapes": "shapes", "yolox_nano": "yolox", "yolov5n": "yolov5", "picodet_s": "dfl"}
"""Model by model, its configuration."""

NAMES = [pytest.param(name, marks=() if name == "shapes" else pytest.mark.slow) for name in CONFIGS]

HOST = BuildOptions(
    precision="int8",
    effort="none",
    nms=NmsOptions(mode="host"),
    silu="keep",
    backend="tensorrt",
    plan=PlanOptions(int8_all=True),
)
DYNAMIC = changed(HOST, batch=(1, 4, 8))
VARIANTS = {
    **{nms: changed(HOST, mode=nms) for nms in ("host", "efficient", "native", "onnx")},
    **{f"dynamic-{nms}": changed(DYNAMIC, mode=nms) for nms in ("host", "efficient", "native", "onnx")},
    "default": changed(HOST, int8_all=False),
    "depthwise": changed(HOST, keep_fp16=("depthwise",)),
    "corrected": changed(HOST, int8_all=False, effort="default"),
    "implicit": changed(HOST, quantization="implicit"),
    "implicit-default": changed(HOST, quantization="implicit", int8_all=False),
    "implicit-depthwise": changed(HOST, quantization="implicit", keep_fp16=("depthwise",)),
    "fp16": changed(HOST, precision="fp16", int8_all=False),
    "fp32": changed(HOST, precision="fp32", int8_all=False),
}
"""What is built, by name."""

NARROWED = "Your ONNX model has been generated with INT64 weights"
CLAMPED = "One or more weights outside the range of INT32 was clamped"
"""The parser's warnings for any model: indices are INT64 in ONNX, and a slice to the end has the largest one."""

PLUGIN_MISSING = "Plugin not found, are the plugin name, version, and namespace correct?"


@dataclass(frozen=True)
class Handed:
    """What trtdet hands to the builder, and the row of the backend it did it for."""

    request: BuildRequest
    caps: Capabilities

    @property
    def facts(self) -> dict[str, Any]:
        """What the building process reads of it."""
        return tensorrt._facts(tensorrt.LIBRARY, self.caps, self.request, ())


class _AtTheBuilder(Exception):
    def __init__(self, handed: Handed) -> None:
        self.handed = handed


def handed_over(model: Path, config: Config, images: Path, place: Path, options: BuildOptions) -> Handed:
    """Runs a whole build up to where the engine would be built."""

    def instead(self: TensorRT, request: BuildRequest, progress: Progress = silent) -> None:
        raise _AtTheBuilder(Handed(request, self.capabilities))

    calibration = CalibrationOptions(images=images, num_images=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "devices", lambda: (cuda.Device("a GPU", 90),))
        patch.setattr(TensorRT, "build", instead)
        with pytest.raises(_AtTheBuilder) as caught:
            build(model, config, place / "bundle", replace(options, calibration=calibration))
    return caught.value.handed


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return shapes.generate(tmp_path_factory.mktemp("images"), "calibration", 2).images


@pytest.fixture(scope="module")
def handed(images, tmp_path_factory):
    """Gives what trtdet hands over for a model, by its name and path; the last ones are remembered."""
    place = tmp_path_factory.mktemp("build")

    @cache
    def make(name: str, model: Path, options: BuildOptions) -> Handed:
        return handed_over(model, load_config(CONFIGS[name]), images, place, options)

    return make


@pytest.fixture
def path(request, name):
    """The model of a name."""
    if name == "shapes":
        return SHAPES_MODEL
    folder: Path = request.getfixturevalue("shared_data")
    return folder / "models" / f"{name}.onnx"


def sizes(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(one.dim_value if one.HasField("dim_value") else -1 for one in value.type.tensor_type.shape.dim)


def known(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """The shapes that ONNX itself infers, by tensor."""
    found = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    listed = (*found.input, *found.value_info, *found.output)
    return {one.name: sizes(one) for one in listed if one.type.tensor_type.HasField("shape")}


def agree(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether two shapes can be the same: -1 is open."""
    if len(ours) != len(theirs):
        return False
    return all(-1 in pair or pair[0] == pair[1] for pair in zip(ours, theirs, strict=True))


def check(model: onnx.ModelProto, parsed: Parsed) -> None:
    """The model was read, whole and without a doubt."""
    assert parsed.ok, parsed.lacks or parsed.errors
    assert (parsed.errors, parsed.findings) == ((), ())
    assert [one for one in parsed.messages if NARROWED not in one and CLAMPED not in one] == []
    assert [one.name for one in parsed.inputs] == [one.name for one in model.graph.input]
    assert [one.name for one in parsed.outputs] == [one.name for one in model.graph.output]
    expected = known(model)
    tensors = [one for layer in parsed.layers for one in layer.outputs if one.name in expected]
    seen = [(one.name, one.shape, expected[one.name]) for one in (*parsed.inputs, *tensors)]
    contradicted = [one for one in seen if not agree(*one[1:])]
    assert contradicted == []
    # All of them where no size is open, or this would say little.
    unknown = [one for one in seen if -1 in one[1] and -1 not in one[2]]
    assert len(seen) > 100 and unknown == []


def convolutions(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in model.graph.node if node.op_type == "Conv"]


def layers_of(parsed: Parsed, kind: str) -> list[str]:
    return [layer.name for layer in parsed.layers if layer.type == kind]


def test_the_program_compiles_without_a_warning(parser):
    assert parser.said == ""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_parser_reads_what_is_handed_over(trt, parser, handed, name, path, variant):
    given = handed(name, path, VARIANTS[variant])
    assert given.caps.version == "8.6.0"
    model = given.request.model
    parsed = parser(model)
    check(model, parsed)
    assert layers_of(parsed, "CONVOLUTION") == convolutions(model) != []
    for op, kind in (("QuantizeLinear", "QUANTIZE"), ("DequantizeLinear", "DEQUANTIZE")):
        assert layers_of(parsed, kind) == [node.name for node in model.graph.node if node.op_type == op]
    open_batch = parsed.inputs[0].shape[0] == -1
    assert open_batch == (given.request.batch is not None) == variant.startswith("dynamic")
    told = say_precisions(trt, parsed, given)
    # A node may become several layers of its name, of which some compute floats although it gives none.
    assert expected_precisions(given, parsed).items() <= told.items() <= given.request.precisions.items()
    if given.request.implicit is not None:
        tensors = [one.name for one in (*parsed.inputs, *(one for layer in parsed.layers for one in layer.outputs))]
        scales = calibration_cache.read(given.request.implicit.cache)
        # As the building process does before it hands them over.
        assert calibration_cache.matched(scales, tensors, (), "the ranges") == scales != {}


@pytest.mark.parametrize("name", NAMES)
def test_the_parser_reads_a_weight_scale_a_tensor(parser, images, tmp_path, monkeypatch, name, path):
    """The form for other versions, in operators that 8.6 has too."""
    monkeypatch.setattr(tensorrt, "DataFlow", lambda **flow: DataFlow(weights=("tensor",)))
    model = handed_over(path, load_config(CONFIGS[name]), images, tmp_path, HOST).request.model
    weights = [node for node in model.graph.node if node.op_type == "DequantizeLinear" and not node.attribute]
    assert len(weights) == sum(node.op_type == "DequantizeLinear" for node in model.graph.node)
    parsed = parser(model)
    check(model, parsed)
    assert layers_of(parsed, "CONVOLUTION") == convolutions(model) != []


class Told:
    """A network as the bindings show it, which keeps the precisions that it is told."""

    def __init__(self, trt: Any, parsed: Parsed) -> None:
        self.num_layers = len(parsed.layers)
        self.layers = [self._layer(trt, layer) for layer in parsed.layers]
        self.get_layer = self.layers.__getitem__

    @staticmethod
    def _layer(trt: Any, layer: Layer) -> SimpleNamespace:
        outputs = [SimpleNamespace(dtype=getattr(trt.DataType, one.type)) for one in layer.outputs]
        return SimpleNamespace(
            name=layer.name,
            precision=None,
            num_outputs=len(outputs),
            get_output=outputs.__getitem__,
            set_output_type=lambda number, dtype: None,
        )


def say_precisions(trt: Any, parsed: Parsed, given: Handed) -> dict[str, str]:
    """What trtdet's building process tells the layers of the network, by name."""
    network, flags = Told(trt, parsed), []
    build_process.set_precisions(trt, network, SimpleNamespace(set_flag=flags.append), given.facts)
    assert flags == [trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS] * bool(given.request.precisions)
    words = {trt.float16: "fp16", trt.float32: "fp32", None: ""}
    return {one.name: words[one.precision] for one in network.layers if one.precision is not None}


def expected_precisions(given: Handed, parsed: Parsed) -> dict[str, str]:
    """The precisions that are asked for; only what computes no float takes none."""
    asked = given.request.precisions
    types = {one.name: one.type for layer in parsed.layers for one in layer.outputs}
    nodes = {node.name: node for node in given.request.model.graph.node}
    assert set(asked) <= set(nodes)
    return {name: one for name, one in asked.items() if types.get(nodes[name].output[0]) in ("FLOAT", "HALF")}


TYPES = {plugin_ops.SAME: "FLOAT", 0: "FLOAT", plugin_ops.INT8: "INT8"}
"""What a plugin writes, by ``output_type``; what reads and writes the same is float here."""


@pytest.mark.parametrize("name", NAMES)
def test_the_parser_makes_the_plugins_of_what_their_nodes_say(trt, parser, library, handed, name, path):
    given = handed(name, path, changed(HOST, silu="plugin", plugins=(library,)))
    nodes = {node.name: node for node in plugin_ops.plugin_nodes(given.request.model.graph)}
    parsed = parser(given.request.model, library)
    check(given.request.model, parsed)
    made = {layer.name: layer for layer in parsed.layers if layer.type == "PLUGIN_V2"}
    assert list(made) == list(nodes) != []
    kinds = set()
    for name, node in nodes.items():
        values = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        plugin, layer = made[name].plugin, made[name]
        assert plugin is not None
        assert (plugin["type"], plugin["version"], plugin["namespace"]) == (node.op_type, "1", plugin_ops.NAMESPACE)
        floats = [value for key in ("input_scale", "factor", "offset") for value in values[key]]
        state = plugin["state"]
        assert int.from_bytes(state[12:16], "little", signed=True) == values["output_type"]
        np.testing.assert_array_equal(np.frombuffer(state, np.float32)[-len(floats) :], np.float32(floats))
        (output,) = layer.outputs
        assert (output.name, output.type) == (node.output[0], TYPES[values["output_type"]])
        kinds.add((output.type, len(values["input_scale"]) > 1))
    # Float and INT8 written, one step and one a channel read.
    assert kinds >= {("INT8", True), ("INT8", False), ("FLOAT", True)}


def test_without_the_library_the_parser_refuses_in_words_that_have_advice(parser, library, handed):
    given = handed("shapes", SHAPES_MODEL, changed(HOST, silu="plugin", plugins=(library,)))
    parsed = parser(given.request.model)
    assert not parsed.ok and PLUGIN_MISSING in parsed.errors[0]["words"]
    node = given.request.model.graph.node[parsed.errors[0]["node"]]
    assert node.op_type == plugin_ops.SILU
    assert "engine.plugins" in messages.advised(parsed.errors[0]["words"], tensorrt._ADVICE)


TWO_STAGE = Path(__file__).parents[1] / "fixtures" / "two_stage"
BOXES = Config.model_validate(
    {
        "name": "two-stage",
        "classes": list(shapes.CLASSES),
        "input": {"size": [128, 128]},
        "head": {"decode": "detections"},
        "nms": "none",
    }
)
DATA_DEPENDENT = {"NON_ZERO", "NMS"}


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    """In the place of the library that the wheel lacks, of which the parser only wants the path."""
    library = tmp_path_factory.mktemp("regions") / "libnvinfer_vc_plugin.so.8"
    command = ["g++", "-shared", "-x", "c++", os.devnull, f"-Wl,-soname,{library.name}", "-o", library]
    subprocess.run(command, check=True)
    return library


@pytest.mark.filterwarnings("ignore:.*activations are zero:trtdet.errors.TrtdetWarning")
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("faster_trace", "default"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("faster_dynamo", "implicit"), ("mask_trace", "fp16"), ("mask_dynamo", "default"))
        ),
    ],
)
def test_the_parser_reads_both_routes_of_a_two_stage_model(
    parser, images, regions, tmp_path, monkeypatch, name, variant
):
    def hand_over(place: str) -> onnx.ModelProto:
        options = changed(VARIANTS[variant], mode="auto")
        return handed_over(TWO_STAGE / f"{name}.onnx", BOXES, images, tmp_path / place, options).request.model

    static = parser(without := hand_over("static"))
    check(without, static)
    assert not DATA_DEPENDENT & {layer.type for layer in static.layers}
    assert layers_of(static, "GRID_SAMPLE") and not layers_of(static, "PLUGIN_V2")
    assert not any(-1 in one.shape for layer in static.layers for one in layer.outputs)

    monkeypatch.setattr(tensorrt, "missing_operators", lambda version, vc_plugin: missing_operators(version))
    parsed = parser(model := hand_over("regions"), regions)
    check(model, parsed)
    assert {layer.type for layer in parsed.layers} >= DATA_DEPENDENT
    aligned = [node for node in model.graph.node if node.op_type == "RoiAlign"]
    plugins = [layer.plugin for layer in parsed.layers if layer.plugin is not None]
    assert [plugin["type"] for plugin in plugins] == ["ROIAlign_TRT"] * len(aligned) != []


def net(text: str, opset: int = 13, **weights: np.ndarray) -> onnx.ModelProto:
    imports = f'"" : {opset}, "{plugin_ops.PLUGIN_DOMAIN}" : 1'
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]>\nnet {text}")
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


QUANTIZED = """(float[1,3,8,8] x) => (float[1,4,6,6] y) {
    [q] a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z)
    v = QuantizeLinear<axis = 0>(w, t, o) u = DequantizeLinear<axis = 0>(v, t, o) [conv] y = Conv<KERNEL>(b, u) }"""


def quantized(kernel: str = "kernel_shape = [3, 3]", **changed: np.ndarray) -> onnx.ModelProto:
    """A convolution in INT8."""
    weights = {
        "s": np.float32(0.1),
        "z": np.int8(0),
        "w": np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32),
        "t": np.full(4, 0.01, np.float32),
        "o": np.zeros(4, np.int8),
    }
    text = QUANTIZED.replace("<KERNEL>", f"<{kernel}>" if kernel else "")
    return net(text, **{key: np.asarray(value) for key, value in {**weights, **changed}.items()})


REFUSED = {
    "a zero point": (quantized(z=np.int8(3)), "TensorRT only supports symmetric quantization"),
    "a zero point of one channel": (quantized(o=np.array([0, 0, 1, 0], np.int8)), "only supports symmetric quant"),
    "unsigned values": (quantized(z=np.uint8(128)), "TensorRT only supports symmetric quantization"),
    "a scale of 0": (quantized(s=np.float32(0)), "Scale coefficients must all be positive"),
    "too few scales": (
        quantized(t=np.ones(3, np.float32), o=np.zeros(3, np.int8)),
        "The number of scales is not equal to the number of output channels",
    ),
    "an unknown operator": (net("(float[1,8,4,4] x) => (float[1,8,4,4] y) { y = Swish(x) }", 24), PLUGIN_MISSING),
    "a plugin that nobody has": (
        net("(float[1,8,4,4] x) => (float[1,8,4,4] y) { [mine] y = trt.plugins.Mine(x) }"),
        PLUGIN_MISSING,
    ),
}


def test_the_parser_reads_a_convolution_in_int8(parser):
    parsed = parser(quantized())
    assert (parsed.ok, parsed.findings, layers_of(parsed, "CONVOLUTION")) == (True, (), ["conv"])


@pytest.mark.parametrize("case", REFUSED)
def test_the_parser_says_why_it_refuses(parser, case):
    model, words = REFUSED[case]
    parsed = parser(model)
    assert (parsed.ok, parsed.layers) == (False, ())
    assert words in parsed.errors[0]["words"]
    # Its errors alone say it: of a model in memory the log has not a word.
    assert not any(words in message for message in parsed.messages)


def test_the_building_process_passes_the_reason_on(trt, tmp_path, monkeypatch, parser):
    model, words = REFUSED["a plugin that nobody has"]
    (error,) = parser(model).errors
    said = {"code": error["code"], "desc": error["words"], "file": "", "func": "", "line": 0, "node": error["node"]}
    assert set(said) == {name for name in dir(trt.ParserError) if not name.startswith("_")}
    refusal = SimpleNamespace(**{name: lambda value=value: value for name, value in said.items()})
    refusing = SimpleNamespace(parse=lambda data: False, num_errors=1, get_error=lambda index: refusal)
    library = SimpleNamespace(
        init_libnvinfer_plugins=lambda logger, namespace: True,
        Builder=lambda logger: SimpleNamespace(create_network=lambda flags: None),
        OnnxParser=lambda network, logger: refusing,
    )
    monkeypatch.chdir(tmp_path)
    onnx.save(model, "model.onnx")
    request = {"plugins": [], "loads_plugins": True, "compiled_plugins": False, "network_flags": []}
    logger = SimpleNamespace(errors=[], first=lambda: logger.errors[0])
    with pytest.raises(build_process.RefusedError) as refused:
        build_process.build(library, request, logger, lambda report: None)
    assert words in str(refused.value) and model.graph.node[0].name in str(refused.value)


def test_a_convolution_in_int8_must_say_its_kernel_which_trtdet_makes_it_do(parser, images, tmp_path):
    refused = parser(quantized(kernel=""))
    assert not refused.ok and "input tensor shape misaligns with the input kernel shape" in refused.errors[0]["words"]
    model, count = onnx.load(SHAPES_MODEL), 0
    for node in model.graph.node:
        for one in [one for one in node.attribute if one.name == "kernel_shape" and node.op_type == "Conv"]:
            node.attribute.remove(one)
            count += 1
    assert count == len(convolutions(model))
    onnx.save(model, tmp_path / "model.onnx")
    request = handed_over(tmp_path / "model.onnx", load_config("shapes"), images, tmp_path, HOST).request
    check(request.model, parser(request.model))


def test_the_row_of_missing_operators_is_the_parsers_own(parser, handed):
    caps = handed("shapes", SHAPES_MODEL, HOST).caps
    schemas = onnx.defs.get_all_schemas_with_history()
    known = {one.name for one in schemas if not one.domain and one.since_version <= caps.max_opset}
    # What it says that it does not know, and reads, or would with a library that its package has not.
    denied = {"NonMaxSuppression", "NonZero", "RoiAlign"}
    assert set(parser.unknown(sorted(known))) == set(caps.missing_ops) & known | denied
    assert parser.unknown(caps.missing_ops) == list(caps.missing_ops)


def test_the_package_lacks_the_library_for_roi_align(parser):
    text = """(float[1,3,4,4] x, float[2,4] r) => (float[2,3,2,2] y) {
        y = RoiAlign<output_height = 2, output_width = 2, coordinate_transformation_mode = "half_pixel">(x, r, b) }"""
    parsed = parser(net(text, 16, b=np.zeros(2, np.int64)))
    assert not parsed.ok and "Unable to open library: libnvinfer_vc_plugin.so.8" in parsed.errors[0]["words"]


def test_trtdet_refuses_swish_before_the_parser_does(images, tmp_path):
    with pytest.raises(BackendError, match="cannot take --silu swish: its parser knows the operator from TensorRT 11"):
        handed_over(SHAPES_MODEL, load_config("shapes"), images, tmp_path, changed(HOST, silu="swish"))


def test_what_the_stand_in_has_not_is_named(parser):
    text = "(float[1,4,4,4] x) => (float[1,4,4,4] y) { y = GroupNormalization<num_groups = 2>(x, s, b) }"
    parsed = parser(net(text, 18, s=np.ones(2, np.float32), b=np.zeros(2, np.float32)))
    assert (parsed.ok, parsed.lacks) == (False, "VNetworkDefinition::addNormalization")


@pytest.mark.parametrize("opset", [18, 19, 20, 21])
def test_a_newer_model_is_handed_over_in_an_opset_that_the_parser_reads(parser, images, tmp_path, opset):
    newer = onnx.version_converter.convert_version(onnx.load(SHAPES_MODEL), opset)
    newer.ir_version = 10
    onnx.save(newer, tmp_path / "model.onnx")
    given = handed_over(tmp_path / "model.onnx", load_config("shapes"), images, tmp_path, HOST)
    assert given.request.model.opset_import[0].version == given.caps.max_opset == 17
    parsed = parser(given.request.model)
    check(given.request.model, parsed)
    assert layers_of(parsed, "CONVOLUTION") == convolutions(given.request.model)


def test_the_parser_misreads_a_newer_form_and_reads_the_lowered_one(parser):
    text = "(float[1,8,4,4] x) => (float[1,8,1,1] y) { y = ReduceMean(x, axes) }"
    model = net(text, 18, axes=np.array([2, 3]))
    assert [one.shape for one in parser(model).outputs] == [(1, 1, 1, 1)]
    lowered, count = lower(model, 17, {})
    assert count == 1
    assert [one.shape for one in parser(lowered).outputs] == [(1, 8, 1, 1)]
