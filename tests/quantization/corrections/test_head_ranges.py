"""Ranges and channel maps, chosen by their effect on the detections."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from trtdet.backends import OnnxRunner
from trtdet.calibration import Range, Ranges
from trtdet.passes import Decoded
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import Origin
from trtdet.quantization import DEFAULT_CORRECTIONS, HeadError, correct, insert_qdq, place, sense
from trtdet.quantization import head_noise as head_noise_module
from trtdet.quantization.backward import OPERATORS
from trtdet.quantization.backward.tape import Tape
from trtdet.quantization.corrections.head_ranges import Start, head_noise
from trtdet.quantization.head_noise import FRACTIONS, HeadNoise, TensorNoise
from trtdet.quantization.weight_forms import activation_pair


def only(model: Any, name: str) -> Any:
    """The placement of a single tensor."""
    placement = place(model)
    return replace(placement, activations=(name,), readers={name: placement.readers[name]})


def test_clipping_is_what_the_channels_biases_leave_and_the_mean_amount_is_weighed_by_the_gradients():
    rng = np.random.default_rng(0)
    images = rng.normal(0, 1, (3, 2, 3, 20, 25)).astype(np.float32)
    noise = TensorNoise(float(np.abs(images[:, 0]).max()))
    for value, slope in images:
        noise.add(value, slope)
    weights = np.square(images[:, 1].astype(np.float64)).sum(1, keepdims=True)
    assert noise.squares.sum() == pytest.approx(weights.sum(), rel=1e-4)
    before = 0.0
    for fraction, squared, cut in zip(FRACTIONS, noise.clipped, noise.cut.T, strict=True):
        values = images[:, 0].astype(np.float64)
        away = values - values.clip(-fraction * noise.largest, fraction * noise.largest)
        expected = (away * weights).sum((0, 2, 3))
        np.testing.assert_allclose(cut, expected, rtol=1e-3, atol=1e-3)
        left = away - (expected / weights.sum())[:, None, None]
        before = max(before, float(np.square((left * images[:, 1]).sum((1, 2, 3))).sum()))
        assert squared == pytest.approx(before, rel=1e-3, abs=1e-3)


def test_a_gradient_that_is_not_finite_does_not_count():
    noise = TensorNoise(1.0)
    noise.add(np.ones((2, 4, 4), np.float32), np.full((2, 4, 4), np.nan, np.float32))
    assert not noise.squares.any() and not noise.cut.any() and not noise.clipped.any()


def test_the_noise_of_rounding_is_that_of_the_error_at_the_head(model, sources, chosen):
    """Every activation alone, at its whole range: within a factor of three of what is measured, tensor by tensor.

    The input is left out: pixels are whole numbers, whose rounding errors are not spread evenly.
    """
    given, detector = sources(24), with_boxes(model)
    ranges = chosen(detector, given, "minmax")["minmax"]
    noise = head_noise(detector, place(detector), ranges, given)
    names = [name for name in place(detector).activations if name != detector.graph.input[0].name]
    assert len(names) > 2
    for name in names:
        alone = rounded_alone(detector, only(detector, name), ranges)
        error = HeadError()
        for reference, got in given.outputs([detector, alone], given.images, "measuring"):
            error.update(given.head.read(reference), given.head.read(got))
        assert error.power / 3 < noise.noise(name, ranges.tensors[name].amax) < 3 * error.power, name


def with_boxes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with boxes of about 60 pixels, whose IoU has a meaning."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    (last,) = (node for node in made.graph.node if "boxes" in node.output)
    last.output[0] = "moves"
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 0, 60, 60], np.float32), "corners"))
    made.graph.node.append(onnx.helper.make_node("Add", ["moves", "corners"], ["boxes"], "placed"))
    return made


def rounded_alone(model: onnx.ModelProto, placement: Any, ranges: Ranges) -> onnx.ModelProto:
    """A Q/DQ pair at one tensor, and weights in float."""
    graph, (name,) = to_graph(model), placement.activations
    step = np.float32(ranges.tensors[name].amax / 127)
    pair = activation_pair(Writer(graph, "alone", Origin.QDQ), graph.tensors()[name], step)
    for node in graph.nodes:
        for position in range(len(node.inputs)):
            if (node.name, position) in placement.readers[name]:
                node.inputs[position] = pair
    return to_model(graph)


def test_an_outlier_that_no_detection_needs_is_clipped_and_others_are_not(model, case):
    given, placement, ranges = case
    noise = head_noise(model, placement, ranges, given)
    assert noise.seen
    found, start = sense(model, placement, ranges, given)
    assert start.noise is not None and start.plain is ranges and not start.reason
    source = model.graph.input[0].name
    assert found.tensors[source] == ranges.tensors[source]
    for name in placement.activations:
        best = noise.best(name)
        assert 0 < best <= noise.tensors[name].largest
        assert all(
            noise.noise(name, best) <= noise.noise(name, amax) for amax in FRACTIONS * noise.tensors[name].largest
        )
    # Where clipping loses nothing at the head, as much is clipped as is tried.
    quiet = noise.tensors[placement.activations[-1]]
    quiet.clipped[:] = 0
    assert noise.best(placement.activations[-1]) == pytest.approx(FRACTIONS[-1] * quiet.largest)
    # And where clipping costs much, nothing is.
    quiet.clipped[1:] = 1e12
    assert noise.best(placement.activations[-1]) == pytest.approx(quiet.largest)


@pytest.mark.parametrize("opset", [21, pytest.param(24, marks=pytest.mark.opset(24))])
def test_signs_are_random_in_every_opset(opset, net):
    model = net("(float[1,40,50] x) => (float[1,40,50] y) { y = Relu(x) }")
    model.opset_import[0].version, model.ir_version = opset, 10
    graph = to_graph(model)
    signs = head_noise_module._signs(Tape(graph), graph.outputs[0], 1)
    signs.dtype, graph.outputs = np.float32, [signs]
    (drawn,) = OnnxRunner(to_model(graph))(np.zeros((1, 40, 50), np.float32)).values()
    assert set(np.unique(drawn)) == {-1.0, 1.0}
    flat = drawn.reshape(-1)
    assert abs(flat.mean()) < 0.1 and abs((flat[1:] * flat[:-1]).mean()) < 0.1


@pytest.mark.parametrize("empty", [False, True])
def test_masks_count_relative_to_their_coefficients_and_prototypes_also_where_these_are_zero(empty, net, normal):
    model = net(
        "(float[1,5,3] mask_coefficients, float[1,3,4,6] prototypes, float[1,5,1] share) => (float[1,5,1] y) "
        "{ y = Identity(share) }"
    )
    graph = to_graph(model)
    tensors = graph.tensors()
    parts = tuple((part, part) for part in ("mask_coefficients", "prototypes"))
    head = Decoded("boxes", "scores", parts=parts)
    factors = head_noise_module._of_parts(Tape(graph), tensors, head, share=tensors["share"], sizes=tensors["share"])
    for factor in factors.values():
        factor.dtype = np.float32
    graph.outputs = list(factors.values())
    coefficients, prototypes = normal(1, 5, 3, seed=1), normal(1, 3, 4, 6, seed=2)
    if empty:
        coefficients[:, 1], prototypes[:] = 0, 0
    share = np.abs(normal(1, 5, 1, seed=3))
    given = {"mask_coefficients": coefficients, "prototypes": prototypes, "share": share}
    of_coefficients, of_prototypes = OnnxRunner(to_model(graph)).feed(given).values()
    least = np.float32(1e-6)
    lengths = np.maximum(np.linalg.norm(coefficients, axis=-1, keepdims=True), least)
    np.testing.assert_allclose(of_coefficients, share / lengths, rtol=1e-5)
    whole = np.linalg.norm(share) / max(np.linalg.norm(prototypes), least)
    np.testing.assert_allclose(of_prototypes.reshape(-1), [whole], rtol=1e-5)


def test_an_open_batch_is_measured_like_a_batch_of_one(model, case):
    given, placement, ranges = case
    dynamic = onnx.ModelProto()
    dynamic.CopyFrom(model)
    for value in (*dynamic.graph.input, *dynamic.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    del dynamic.graph.value_info[:]
    one, other = (head_noise(each, placement, ranges, given) for each in (model, dynamic))
    assert one.seen
    for name in placement.activations:
        amax = one.tensors[name].largest / 2
        assert other.noise(name, amax) == pytest.approx(one.noise(name, amax), rel=1e-4)


def test_channels_measured_in_shares_of_their_reach_give_the_noise_of_one_range_too(model, case):
    """One range for all channels is judged alike, whatever a channel is measured in."""
    given, placement, ranges = case
    plain = head_noise(model, placement, ranges, given)
    largest = plain.tensors["c"].largest
    reach = largest * np.array([1, 1, 2, 2, 4, 4, 1, 2], np.float64)
    mapped = head_noise(model, placement, ranges, given, {"c": reach})
    noise = mapped.noise_of("c", np.full(8, largest))
    assert noise == pytest.approx([plain.noise("c", fraction * largest) for fraction in FRACTIONS], rel=0.02)
    assert mapped.cut("c", np.full(8, largest / 2)) == pytest.approx(plain.cut("c", largest / 2), rel=0.1, abs=1e-4)


def test_a_channel_is_narrowed_where_its_large_values_reach_no_detection():
    """Two channels of the same values; of the second, the large ones have no gradient."""
    rng = np.random.default_rng(0)
    noise = TensorNoise(1.0)
    for _ in range(8):
        value = np.repeat(rng.uniform(-0.1, 0.1, (1, 40, 40)), 2, axis=0).astype(np.float32)
        value[:, :20, :20] *= 10
        slope = rng.normal(0, 1, value.shape).astype(np.float32)
        slope[1, :20, :20] = 0
        noise.add(value, slope)
    first, second = noise.narrowest()
    assert first == 1.0
    assert 0.1 < second < 0.2  # a little wider than the values that count
    limits = np.array([first, second])
    assert noise.noise_of(limits)[0] < 0.6 * noise.noise_of(np.ones(2))[0]


@pytest.mark.parametrize(("share", "fewest", "narrowed"), [(0.1, 2, True), (1.0, 2, False), (0.1, 24, False)])
def test_channels_are_narrowed_where_they_make_much_of_the_noise_and_enough_images_tell(
    model, case, monkeypatch, share, fewest, narrowed
):
    given, placement, ranges = case
    found, start = sense(model, placement, ranges, given)
    asked = []
    narrowest = HeadNoise.narrowest
    monkeypatch.setattr(HeadNoise, "narrowest", lambda noise, name: asked.append(name) or narrowest(noise, name))
    monkeypatch.setattr("trtdet.quantization.corrections._LARGE", share)
    monkeypatch.setattr("trtdet.quantization.corrections._FEWEST", fewest)
    correct(model, placement, {"minmax": found}, DEFAULT_CORRECTIONS, given, start)
    assert bool(asked) == narrowed


@pytest.mark.parametrize("why", ["operator", "nothing"])
def test_without_gradients_the_rule_stands_and_the_summary_says_why(model, case, monkeypatch, why):
    given, placement, ranges = case
    if why == "operator":
        monkeypatch.delitem(OPERATORS, "Relu")
    else:
        monkeypatch.setattr("trtdet.quantization.head_noise.SEEN", 2.0)
    found, start = sense(model, placement, ranges, given)
    assert found is ranges and start.noise is None
    said = {
        "operator": "has no gradient here: the operator Relu",
        "nothing": "nothing is detected on the images",
    }[why]
    assert said in start.reason
    done = correct(model, placement, {"minmax": found}, DEFAULT_CORRECTIONS, given, start)
    assert f"range not tried: {start.reason}" in done.summary


def test_with_gradients_few_maps_are_among_the_forms_that_are_compared(model, case, distance):
    """The outlier of tensor ``c`` is what a map puts right; whatever is kept is better than the rule by far."""
    given, placement, ranges = case
    found, start = sense(model, placement, ranges, given)
    done = correct(model, placement, {"minmax": found}, DEFAULT_CORRECTIONS, given, start)
    int8 = insert_qdq(model, placement, done.ranges, done.corrections)
    assert distance(model, int8, given) < distance(model, insert_qdq(model, placement, ranges), given) / 2
    assert isinstance(start, Start) and all(isinstance(seen, Range) for seen in done.ranges.tensors.values())


def test_a_map_that_does_not_lower_the_noise_at_the_detections_is_not_tried(model, case, monkeypatch):
    """It may lower the error of its layer, where outputs that no detection needs weigh like the others."""
    given, placement, ranges = case
    found, start = sense(model, placement, ranges, given)
    monkeypatch.setattr(HeadNoise, "noise_of", lambda *_: np.full(len(FRACTIONS), 1e9))
    done = correct(model, placement, {"minmax": found}, DEFAULT_CORRECTIONS, given, start)
    assert all(channels.scale is None for channels in done.corrections.tensors.values())
