"""The newest opset of each parser, and TensorRT-RTX's row against its own parser."""

import numpy as np
import onnx
import pytest
from engine_programs import needs_rtx
from small_models import net

from trtdet.backends import BuildRequest, choose
from trtdet.backends.libraries import library_named
from trtdet.backends.tensorrt.opsets import NEVER, missing_operators
from trtdet.building import build
from trtdet.config import load_config
from trtdet.errors import BackendError
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions
from trtdet.passes import Options, load_model, rewrite
from trtdet.passes.opset.lowering import lower

FORMS = """(float[1,3,16,16] x) => (float[1,2,1,1] y) {
    c = Conv<pads = [1,1,1,1]>(x, w)
    g = GroupNormalization<num_groups = 2>(c, ones, ones)
    s = Swish(g)
    m, n = Split<num_outputs = 2, axis = 1>(s)
    h = Gelu(m)
    i = Mish(n)
    p = MaxPool<kernel_shape = [3,3], strides = [2,2], ceil_mode = 1>(h)
    q = Resize<axes = [2,3], mode = "linear">(p, , scales)
    r = Slice(q, zero, end, two)
    t = Pad(i, widths, , spatial)
    u = ReduceMean(t, spatial)
    v = ReduceMean(r, spatial)
    y = Add(u, v) }"""


def forms(opset: int) -> onnx.ModelProto:
    """The newest forms of what detectors are made of."""
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    return net(
        FORMS,
        opset,
        w=weight,
        ones=np.ones(4, np.float32),
        scales=np.array([2, 2], np.float32),
        widths=np.array([1, 1, 1, 1]),
        spatial=np.array([2, 3]),
        zero=np.array([0]),
        end=np.array([8]),
        two=np.array([2]),
    )


@pytest.mark.parametrize(
    ("version", "opset", "lacks", "reads"),
    [
        ((8, 5), 17, "Swish", "Conv"),
        ((8, 6), 17, "CastLike", "LayerNormalization"),
        ((9, 0), 19, "CastLike", "Conv"),
        ((9, 3), 19, "Swish", "Hardmax"),
        ((10, 0), 20, "DeformConv", "CastLike"),
        ((10, 14), 20, "Swish", "STFT"),
        ((10, 15), 24, "Swish", "Mish"),
        ((10, 16), 24, "Swish", "Gelu"),
        ((11, 0), 24, "Unique", "Swish"),
        ((11, 4), 24, "Unique", "Swish"),
        ((11, 5), 24, "Unique", "Swish"),
    ],
)
def test_the_table_by_version(version, opset, lacks, reads):
    assert library_named("tensorrt").newest_opset("{}.{}".format(*version)) == opset
    missing = missing_operators(version)
    assert lacks in missing
    assert reads not in missing
    assert set(NEVER) <= set(missing)


def test_the_reason_names_the_version_that_has_the_operator():
    assert missing_operators((10, 16))["Swish"] == "its parser knows the operator from TensorRT 11 on"
    assert missing_operators((10, 3))["STFT"] == "its parser knows the operator from TensorRT 10.5 on"
    assert missing_operators((11, 0))["Unique"] == "TensorRT's parser does not know the operator"


@needs_rtx
def test_the_parser_of_rtx_reads_every_opset_of_its_row():
    backend = choose("tensorrt-rtx")
    newest = backend.capabilities.max_opset
    assert newest is not None
    text = "(float[1,3,16,16] x) => (float[1,8,14,14] y) { c = Conv(x, w) s = Sigmoid(c) y = Mul(c, s) }"
    weight = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    for opset in range(13, newest + 1):
        assert backend.build(BuildRequest(net(text, opset, w=weight), (86,))).engine[:4] == b"vtrt", opset


@needs_rtx
@pytest.mark.parametrize("opset", [24, 25])
def test_the_parser_of_rtx_reads_the_newest_forms(opset):
    assert choose("tensorrt-rtx").build(BuildRequest(forms(opset), (86,))).engine[:4] == b"vtrt"


@needs_rtx
def test_rtx_lacks_what_its_row_says_it_lacks():
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    definition = builder.create_network(0)
    parser = trt.OnnxParser(definition, logger)
    assert [op for op in (*NEVER, "DeformConv") if parser.supports_operator(op)] == []
    listed = {"NonMaxSuppression", "NonZero", "RoiAlign"}  # it parses these, and fails with them later
    known = {one.name for one in onnx.defs.get_all_schemas_with_history() if not one.domain and one.since_version <= 24}
    lacking = {op for op in known if not parser.supports_operator(op)}
    assert lacking <= set(choose("tensorrt-rtx").capabilities.missing_ops) - listed


@needs_rtx
def test_the_newest_forms_build_in_the_words_of_every_older_parser():
    """TensorRT 8.6 itself is not here: RTX reads what is written for it."""
    backend = choose("tensorrt-rtx")
    model = forms(25)
    for version in ((8, 6), (9, 3), (10, 0), (10, 15)):
        newest = library_named("tensorrt").newest_opset("{}.{}".format(*version))
        lowered, count = lower(model, newest, missing_operators(version))
        assert count
        assert not {node.op_type for node in lowered.graph.node} & set(missing_operators(version))
        assert backend.build(BuildRequest(lowered, (86,))).engine[:4] == b"vtrt"


@needs_rtx
@pytest.mark.opset(28)
def test_a_model_of_a_newer_opset_is_built_from_end_to_end(tmp_path):
    newer = onnx.version_converter.convert_version(onnx.load(SHAPES_MODEL), 28)
    newer.ir_version = 10
    path = tmp_path / "newer.onnx"
    onnx.save(newer, path)
    built = build(path, load_config("shapes"), tmp_path / "bundle", BuildOptions(precision="fp32", sms=(86,)))
    made = onnx.load(tmp_path / "bundle" / "fp32.onnx")
    assert made.opset_import[0].version == choose("tensorrt-rtx").capabilities.max_opset
    assert built.bundle is not None


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "newest"), [("yolox_nano", "yolox", 24), ("yolov5n", "yolov5", 20), ("picodet_s", "dfl", 17)]
)
def test_real_models_build_after_they_are_lowered(shared_data, tmp_path, name, config, newest):
    newer = onnx.version_converter.convert_version(onnx.load(shared_data / "models" / f"{name}.onnx"), 26)
    newer.ir_version = 10
    path = tmp_path / "newer.onnx"
    onnx.save(newer, path)
    done = rewrite(load_model(path), Options(load_config(config), "native", 1, 3840, max_opset=newest)).model
    assert done.opset_import[0].version == newest
    try:
        built = choose("tensorrt-rtx").build(BuildRequest(done, (86,)))
    except BackendError as error:
        pytest.fail(str(error))
    assert built.engine[:4] == b"vtrt"
