"""The layers that Jetson's DLA takes, by NVIDIA's published limits."""

import numpy as np
import onnx
import pytest
from small_models import net

from trtdet.backends import place_on_dla
from trtdet.backends.tensorrt.dla import has_dla
from trtdet.config import load_config
from trtdet.passes import Options, load_model, rewrite


def network(body: str, shape: str = "1,8,32,32", **constants: object) -> onnx.ModelProto:
    """A network from x to y with these constants, with the shapes of its tensors."""
    model = net(f"(float[{shape}] x) => (float[N,C,H,W] y) {{ {body.replace('<>', '')} }}", **constants)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def weights(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def reason(body: str, shape: str = "1,8,32,32", **constants: object) -> str:
    """Why the first layer is not taken; empty if it is."""
    placement = place_on_dla(network(body, shape, **constants))
    return next(iter(placement.on_gpu.values()), "")


CONVOLUTION = "y = Conv<{}>(x, w)"


@pytest.mark.parametrize(
    ("attributes", "shape", "words"),
    [
        ("kernel_shape = [32, 32]", (4, 8, 32, 32), ""),
        ("pads = [3, 3, 3, 3]", (4, 8, 33, 1), "its kernel is 33x1, the largest is 32"),
        ("strides = [8, 8]", (4, 8, 3, 3), ""),
        ("strides = [9, 1]", (4, 8, 3, 3), "its stride is 9x1, the largest is 8"),
        ("pads = [32, 0, 32, 0]", (4, 8, 3, 3), "its padding is 32x0x32x0, the largest is 31"),
        ("pads = [1, 0, 1, 0]", (4, 8, 1, 1), "its padding 1x0x1x0 is not less than its kernel"),
        ("pads = [1, 1, 1, 1]", (4, 8, 3, 3), ""),
        ("dilations = [32, 1], pads = [31, 0, 31, 0]", (4, 8, 2, 3), "not less than its kernel"),
        ("dilations = [33, 1]", (4, 8, 1, 1), "its dilation is 33x1, the largest is 32"),
        ("group = 8", (8, 1, 3, 3), ""),
        ("", (8193, 8, 1, 1), "its sizes are 1x8193x64x64, the most are 8192"),
    ],
)
def test_a_convolution_has_limits(attributes, shape, words):
    # Of sizes alone, with a kernel that fits into the image.
    size = "1,8,64,64"
    given = reason(CONVOLUTION.format(attributes), size, w=weights(*shape))
    assert words in given and bool(words) == bool(given)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("y = Relu(x)", ""),
        ("y = Sigmoid(x)", ""),
        ("y = HardSigmoid(x)", "DLA has no HardSigmoid"),
        ("y = Softplus(x)", "DLA has no Softplus"),
        ("y = MaxPool<kernel_shape = [8, 8], strides = [16, 16]>(x)", ""),
        ("y = MaxPool<kernel_shape = [9, 9], pads = [4, 4, 4, 4]>(x)", "its kernel is 9x9, the largest is 8"),
        ("y = GlobalAveragePool(x)", "its kernel is 32x32, the largest is 8"),
        ("y = Concat<axis = 1>(x, x)", ""),
        ("y = Concat<axis = -3>(x, x)", ""),
        ("y = Concat<axis = 2>(x, x)", "it concatenates axis 2, DLA takes channels alone"),
        ("y = Softmax<axis = 1>(x)", ""),
        ("y = Transpose<perm = [0, 2, 3, 1]>(x)", ""),
        ("y = Transpose<perm = [1, 0, 2, 3]>(x)", "it moves the batch"),
        ("a, y = Split<axis = 1>(x)", ""),
        ("a, y = Split<axis = 2>(x)", ""),
        ("y = Exp(x)", "DLA has no Exp"),
    ],
)
def test_other_layers_have_limits(body, words):
    assert reason(body) == words


def test_rescaling_takes_whole_scales_and_a_few_modes():
    def resized(scales: list[float], attributes: str) -> str:
        return reason(f"y = Resize<{attributes}>(x, r, s)", r=np.zeros(0, np.float32), s=np.float32(scales))

    nearest = 'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'
    linear = 'mode = "linear", coordinate_transformation_mode = "half_pixel"'
    assert resized([1, 1, 2, 2], nearest) == resized([1, 1, 4, 4], linear) == ""
    assert "its scales are 1, 1, 8, 8, DLA takes whole ones up to 4" in resized([1, 1, 8, 8], linear)
    assert "its scales are 1, 1, 0.5, 0.5" in resized([1, 1, 0.5, 0.5], nearest)
    assert resized([1, 1, 2, 2], nearest.replace("floor", "ceil")) == "nearest with asymmetric coordinates and ceil"
    assert (
        resized([1, 1, 2, 2], linear.replace("half_pixel", "align_corners")) == "linear with align_corners coordinates"
    )


def test_slices_are_static_with_steps_of_one():
    def sliced(start: int, end: int, axis: int, step: int) -> str:
        bounds = dict(zip("abcd", ([start], [end], [axis], [step]), strict=True))
        return reason("y = Slice(x, a, b, c, d)", "2,8,32,32", **bounds)

    assert sliced(0, 4, 1, 1) == sliced(0, 99, 0, 1) == ""
    assert sliced(0, 8, 2, 2) == "its steps are 2, DLA takes 1 alone"
    assert sliced(0, 1, 0, 1) == "it slices images of the batch"


def test_a_transposed_convolution_has_no_padding_and_no_groups():
    body = "y = ConvTranspose<strides = [2, 2], {}>(x, w)"
    assert reason(body.format("group = 1"), w=weights(8, 4, 2, 2)) == ""
    assert "it has 2 groups" in reason(body.format("group = 2"), w=weights(8, 4, 2, 2))
    assert (
        reason(body.format("pads = [1, 1, 1, 1]"), w=weights(8, 4, 4, 4)) == "its padding is 1x1x1x1, the largest is 0"
    )


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("4096,8,4,4", ""),
        ("4097,8,4,4", "its sizes are 4097x8x4x4"),
        ("1,8,1,8193", "its sizes are 1x8x1x8193, the most are 8192 and 4096 images"),
        ("1,8,8", "it has 3 dimensions, DLA takes 4"),
        ("1,8,8,8,8", "it has 5 dimensions"),
        ("1,8,W,4", "its sizes are not known when the engine is built"),
        ("N,8,4,4", ""),
    ],
)
def test_sizes_have_limits(shape, words):
    given = reason("y = Relu(x)", shape)
    assert words in given and bool(words) == bool(given)


def test_a_placement_counts_layers_and_multiply_adds():
    body = "a = Conv(x, w) b = Relu(a) c = Conv(b, v) d = HardSigmoid(c) y = Mul(c, d)"
    model = network(body, w=weights(8, 8, 3, 3), v=weights(8, 8, 1, 1))
    placement = place_on_dla(model, {"Conv_2"})
    assert (placement.layers, list(placement.on_gpu)) == (5, ["Conv_2", "HardSigmoid_3"])
    assert placement.macs_on_gpu == pytest.approx(1 / 10)
    assert str(placement) == (
        "2 of 5 layers, 10.0% of the multiply-adds, go to the GPU by NVIDIA's list of what a DLA takes: 1 like Conv_2: "
        "in FP32, DLA has FP16 and INT8; 1 like HardSigmoid_3: DLA has no HardSigmoid"
    )
    assert str(place_on_dla(network("y = Relu(x)"))) == "the DLA takes all 1 layers"


def test_what_does_not_depend_on_the_image_is_no_layer():
    assert place_on_dla(network("a = Exp(k) y = Add(x, a)", k=weights(1, 8, 1, 1))).layers == 1


@pytest.mark.parametrize(
    ("name", "config", "layers"),
    [
        ("yolox_nano", "yolox", {"MaxPool": 0}),
        ("yolov5n", "yolov5", {}),
        ("picodet_s", "dfl", {"HardSigmoid": 13, "GlobalAveragePool": 13}),
    ],
)
def test_of_published_models_the_convolutions_run_on_a_dla(shared_data, name, config, layers):
    model = load_model(shared_data / "models" / f"{name}.onnx")
    written = rewrite(model, Options(load_config(config), nms="host")).model
    placement = place_on_dla(written)
    kinds = [node.op_type for node in written.graph.node if node.name in placement.on_gpu]
    assert {kind: kinds.count(kind) for kind in layers} == layers and "Conv" not in kinds
    assert placement.macs_on_gpu < 0.001


@pytest.mark.parametrize(
    ("version", "sm", "has"),
    [
        *((version, 87, True) for version in ("8.6.0", "10.3.0", "10.7.0.23", "11.4.1", "12.0.0")),
        *((version, 87, False) for version in ("10.8.0", "10.16.2", "11.0.0", "11.4.0.12")),
        ("8.6.0", 72, True),
        ("10.3.0", 86, False),
        ("11.4.1", 110, False),
    ],
)
def test_versions_and_modules_with_a_dla(version, sm, has):
    assert has_dla(version, sm) == has
