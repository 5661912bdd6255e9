"""Learning a whole INT8 network by its effect on the detections."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'trtdet[correct]'")

import torch

from trtdet.backends import OnnxRunner
from trtdet.errors import TrtdetWarning
from trtdet.progress import Progress
from trtdet.quantization import Corrections, Sources, correct, insert_qdq, place
from trtdet.quantization.corrections.base import Network
from trtdet.quantization.corrections.reconstruct import Reconstruct
from trtdet.quantization.gradients import reconstruction
from trtdet.quantization.gradients.learned import Learned
from trtdet.quantization.gradients.reconstruction import Schedule, Views
from trtdet.quantization.sources import held_back

HEAD = ("boxes", "scores")


def networked(model: onnx.ModelProto, given: Sources, chosen: Any) -> Network:
    ranges = chosen(model, given, "minmax")["minmax"]
    return Network(model, place(model), ranges, Corrections(), (), held_back(given.images)[0], given)


@pytest.fixture
def network(model, sources, chosen):
    return networked(model, sources(16), chosen)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(reconstruction, "Schedule", lambda: Schedule(passes=4))


@pytest.mark.parametrize("names", [(), ("smooth", "round", "bias")])
def test_what_is_learned_starts_as_the_written_network(model, case, normal, names):
    given, placement, ranges = case
    corrections = correct(model, placement, {"minmax": ranges}, names, given).corrections if names else Corrections()
    learned = Learned(model, placement, (ranges, corrections), (), HEAD)
    x = normal(1, 3, 32, 32, seed=9, scale=60) + 120
    expected = OnnxRunner(insert_qdq(model, placement, ranges, corrections))(x)
    float_model = OnnxRunner(model)(x)
    with torch.no_grad():
        got, exact = learned(torch.from_numpy(x)), learned.in_float(torch.from_numpy(x))
    for name in HEAD:
        noise = np.abs(expected[name] - float_model[name]).max()
        # A value between two integers may fall to the other side in another order of adding up.
        assert np.abs(got[name].numpy() - expected[name]).mean() < 0.02 * noise
        np.testing.assert_allclose(exact[name].numpy(), float_model[name], atol=1e-4)
    _, written = learned.written()
    assert all(rounded.same(written.weights[name]) for name, rounded in corrections.weights.items())
    assert {name: channels.step for name, channels in written.tensors.items()} == {
        name: channels.step for name, channels in corrections.tensors.items()
    }


def spoiled(network: Network) -> Network:
    """With channel maps that suit, and weights of which half were rounded down by a step more."""
    model, placement, ranges = network.model, network.placement, network.ranges
    mapped = correct(model, placement, {"minmax": ranges}, ("smooth", "bias"), network.sources).corrections
    down = {}
    for name, rounded in mapped.weights.items():
        less = np.random.default_rng(0).integers(0, 2, rounded.integers.shape)
        down[name] = replace(rounded, integers=(rounded.integers - less).clip(-127, 127).astype(np.int8))
    assert mapped.tensors and down
    return replace(network, corrections=replace(mapped, weights=down))


def written(network: Network) -> onnx.ModelProto:
    return insert_qdq(network.model, network.placement, network.ranges, network.corrections)


def test_learning_lowers_the_error_on_images_held_back_and_adds_no_node(network, distance):
    start = spoiled(network)
    ranges, corrections = Reconstruct().reconstruct(start)
    before, after = written(start), written(replace(start, ranges=ranges, corrections=corrections))
    assert [node.op_type for node in after.graph.node] == [node.op_type for node in before.graph.node]
    assert distance(network.model, after, network.sources) < 0.7 * distance(network.model, before, network.sources)


def test_rows_that_a_model_chooses_are_learned_beside_those_that_detect_the_same(choosing, sources, chosen, distance):
    start = spoiled(networked(choosing, sources(16), chosen))
    ranges, corrections = Reconstruct().reconstruct(start)
    after = written(replace(start, ranges=ranges, corrections=corrections))
    learned, worse = (distance(choosing, model, start.sources, chosen=True) for model in (after, written(start)))
    assert learned < 0.8 * worse


def test_tensors_that_share_a_range_share_it_after(network):
    first, other = network.placement.activations[1:3]
    wide = max(network.ranges.tensors[name].amax for name in (first, other))
    tensors = {
        name: replace(found, amax=wide) for name, found in network.ranges.tensors.items() if name in (first, other)
    }
    shared = replace(network.ranges, tensors={**network.ranges.tensors, **tensors})
    ranges, _ = Reconstruct().reconstruct(replace(network, ranges=shared, together=((first, other),)))
    assert ranges.tensors[first].amax == ranges.tensors[other].amax != wide
    apart, _ = Reconstruct().reconstruct(replace(network, ranges=shared))
    assert apart.tensors[first].amax != apart.tensors[other].amax


class Stopped(Exception):
    pass


def stopping(at: int) -> Progress:
    def progress(stage: str, done: int, total: int) -> None:
        if done == at:
            raise Stopped

    return progress


def test_a_stopped_reconstruction_goes_on_to_the_same_result(network, short, tmp_path):
    whole = Reconstruct().reconstruct(network)
    told: list[int] = []
    kept = replace(network.sources, unfinished=tmp_path / "unfinished")
    count = len(network.images)
    with pytest.raises(Stopped):
        Reconstruct().reconstruct(replace(network, sources=replace(kept, progress=stopping(2 * count + 3))))
    resumed = replace(kept, progress=lambda stage, done, total: told.append(done))
    ranges, corrections = Reconstruct().reconstruct(replace(network, sources=resumed))
    assert told[0] > 2 * count and told[-1] == 4 * count
    assert ranges == whole[0]
    assert all(rounded.same(whole[1].weights[name]) for name, rounded in corrections.weights.items())
    # Of another network nothing is gone on with.
    told.clear()
    Reconstruct().reconstruct(replace(network, images=network.images[1:], sources=resumed))
    assert told[0] < count


def test_a_file_that_keeps_nothing_is_told_and_replaced(network, short, tmp_path):
    path = tmp_path / "unfinished"
    path.write_bytes(b"not a state")
    given = replace(network, sources=replace(network.sources, unfinished=path))
    with pytest.warns(TrtdetWarning, match="keeps no reconstruction that could be gone on with"):
        ranges, _ = Reconstruct().reconstruct(given)
    assert ranges == Reconstruct().reconstruct(network)[0]
    assert path.read_bytes() != b"not a state"


def test_a_view_is_an_image_of_the_same_size_and_repeatable():
    row = torch.linspace(0, 1, 40).expand(1, 3, 30, 40)
    seen = [Views(seed)(row) for seed in range(40)]
    assert all(view.shape == row.shape and float(view.min()) >= 0 and float(view.max()) <= 1 for view in seen)
    assert torch.equal(Views(3)(row), Views(3)(row))
    slopes = [float((view[0, 0, 15, 22] - view[0, 0, 15, 18]) / 4 * 39) for view in seen]
    mirrored = [slope for slope in slopes if slope < 0]
    assert 10 < len(mirrored) < 30
    # Enlarged by at most 1.6, and reduced by as much; across the seam of what goes on around it a slope may be any.
    inside = [abs(slope) for slope in slopes if 0.6 < abs(slope) < 1.65]
    assert len(inside) > 30 and min(inside) < 0.8 and max(inside) > 1.2
