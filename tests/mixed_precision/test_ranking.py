from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from trtdet import CalibrationOptions, CocoDataset, SensitivityOptions, evaluate, load_config, sensitivity
from trtdet.backends import OnnxRunner
from trtdet.data import ImageStream
from trtdet.demo import shapes
from trtdet.errors import BackendError, ConfigError
from trtdet.exporter import SHAPES_MODEL
from trtdet.mixed_precision.macs import DEPTHWISE, multiply_adds
from trtdet.mixed_precision.ranking import rank
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.mixed_precision.subject import Method
from trtdet.pipeline import Prepared, calibrated, host_graph, select_images
from trtdet.pipeline import prepared as prepare
from trtdet.quantization import Entry, HeadError, PrecisionPlan, insert_qdq
from trtdet.runtime.detector import Detector

CONFIG = load_config("shapes")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 6).images


@pytest.fixture(scope="module")
def prepared(images: Path) -> Prepared:
    options = CalibrationOptions("minmax", images=images)
    return prepare(calibrated(host_graph(SHAPES_MODEL, CONFIG), options, select_images(options)), options, ())


@pytest.fixture(scope="module")
def reference(prepared: Prepared) -> Sensitivity:
    return rank(prepared.subject(3), Method("reference"))


def test_a_score_is_the_error_with_that_convolution_alone_in_int8(prepared: Prepared, reference: Sensitivity) -> None:
    subject = prepared.subject(3)
    float_model = OnnxRunner(prepared.model)
    for layer in (reference.layers[0], reference.layers[40]):
        entries = {
            name: Entry("int8" if name == layer.name else "fp32", "") for name in prepared.placement.plan.entries
        }
        alone = insert_qdq(prepared.model, prepared.placement.following(PrecisionPlan(entries)), prepared.ranges)
        runner, error = OnnxRunner(alone), HeadError()
        for batch in ImageStream(subject.images, subject.preprocess):
            one, other = float_model(batch.images), runner(batch.images)
            error.update((one["boxes"][0], one["scores"][0]), (other["boxes"][0], other["scores"][0]))
        assert layer.score == pytest.approx(error.power, rel=1e-4)
        assert layer.distance == pytest.approx(error.distance, rel=1e-4)


def test_every_convolution_is_ranked_once_and_depthwise_ones_as_a_group(reference: Sensitivity) -> None:
    assert len(reference.layers) == 95
    assert [layer.rank for layer in reference.layers] == list(range(1, 96))
    scores = [layer.score for layer in reference.layers]
    assert scores == sorted(scores, reverse=True)
    (group,) = reference.groups
    depthwise = [layer for layer in reference.layers if layer.depthwise]
    assert (group.name, group.rank, group.convs, group.depthwise) == (DEPTHWISE, 0, len(depthwise), True)
    assert group.macs == sum(layer.macs for layer in depthwise)
    assert group.score > depthwise[0].score * 0.5
    assert reference.distance == 0
    assert reference.inferences == 3 * (96 + 3)


def test_the_fast_method_gives_the_same_numbers_for_the_images_it_takes(
    prepared: Prepared, reference: Sensitivity
) -> None:
    subject = prepared.subject(3)
    fast = rank(subject)
    assert fast.images <= 3
    if fast.images == 3:
        expected = {layer.name: layer.score for layer in reference.layers}
        for layer in fast.layers:
            assert layer.score == pytest.approx(expected[layer.name], rel=1e-6, abs=1e-12)
    ours, theirs = ({layer.name for layer in one.layers[:10]} for one in (fast, reference))
    assert len(ours & theirs) >= 8


def test_all_but_one(prepared: Prepared) -> None:
    left = rank(prepared.subject(2), Method("fast", "int8"))
    assert left.base == "int8"
    assert left.distance > 0
    # Taking the worst one out takes error away; what is left of it with that one in float is less than all of it.
    assert left.layers[0].score > left.layers[-1].score
    assert left.layers[0].distance < left.distance
    (group,) = left.groups
    assert group.score > 0


def test_a_killed_run_goes_on_and_gives_the_same(prepared: Prepared, tmp_path: Path) -> None:
    subject = prepared.subject(2)
    rows = tmp_path / "rows.jsonl"
    whole = rank(subject, rows=rows)
    lines = rows.read_text().splitlines()
    assert len(lines) == 1 + 96
    rows.write_text("\n".join(lines[:40]) + "\n" + lines[40][:30])
    seen: list[tuple[int, int]] = []
    again = rank(subject, rows=rows, progress=lambda stage, done, total: seen.append((done, total)))
    assert seen[0] == (32, 96)
    assert [(one.name, one.score) for one in again.layers] == [(one.name, one.score) for one in whole.layers]
    kept = [json.loads(line) for line in rows.read_text().splitlines()]
    assert kept[:40] == [json.loads(line) for line in lines[:40]]
    assert sorted(row["name"] for row in kept[1:]) == sorted(json.loads(line)["name"] for line in lines[1:])
    with pytest.raises(ConfigError, match="another model, other images or other options"):
        rank(subject, Method("reference"), rows)


def test_map_is_measured_where_boxes_are_known(tmp_path: Path, images: Path) -> None:
    split = shapes.generate(tmp_path, "val", 3)
    options = SensitivityOptions(
        CalibrationOptions("minmax", images=images), (), 3, images=split.images, annotations=split.annotations
    )
    found = sensitivity(SHAPES_MODEL, CONFIG, options)
    dataset = CocoDataset.load(split.annotations, split.images, CONFIG.classes)
    expected = evaluate(Detector.open(SHAPES_MODEL, CONFIG), dataset).result.map
    assert found.map == pytest.approx(expected, abs=1e-9)
    assert found.images == 3
    assert all(layer.map is not None for layer in found.layers)
    assert any(layer.map != found.map for layer in found.layers)
    assert "mAP" in found.table()
    with pytest.raises(ConfigError, match="belong together"):
        sensitivity(SHAPES_MODEL, CONFIG, replace(options, annotations=None))


def test_a_ranking_is_kept_and_read(reference: Sensitivity, tmp_path: Path) -> None:
    reference.save(tmp_path / "s.json")
    assert Sensitivity.load(tmp_path / "s.json") == reference
    (tmp_path / "cut.json").write_text((tmp_path / "s.json").read_text()[:100])
    with pytest.raises(ConfigError, match="is not a ranking"):
        Sensitivity.load(tmp_path / "cut.json")
    with pytest.raises(ConfigError, match="does not exist; 'trtdet sensitivity' writes one"):
        Sensitivity.load(tmp_path / "no.json")


def test_multiply_adds() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]> net (float[1,4,8,8] x) => (float[1,8,16,16] y) {
        a = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w) b = Conv<group = 6, pads = [1,1,1,1]>(a, d)
        c = Conv<group = 2>(b, g) y = ConvTranspose<strides = [4,4]>(c, t) }"""
    )
    shapes_of = {"w": (6, 4, 3, 3), "d": (6, 1, 3, 3), "g": (4, 3, 1, 1), "t": (4, 8, 4, 4)}
    for name, shape in shapes_of.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
    found = multiply_adds(onnx.shape_inference.infer_shapes(model))
    assert {name: one.count for name, one in found.items()} == {
        "n0": 6 * 4 * 9 * 16,
        "n1": 6 * 9 * 16,
        "n2": 4 * 3 * 16,
        "n3": 4 * 8 * 16 * 16,
    }
    assert [name for name, one in found.items() if one.depthwise] == ["n1"]


def test_nothing_to_rank(prepared: Prepared) -> None:
    subject = prepared.subject(2)
    with pytest.raises(ConfigError, match="needs images"):
        rank(replace(subject, images=()))
    plan = PrecisionPlan({name: Entry("fp32", "no") for name in subject.placement.plan.entries})
    with pytest.raises(ConfigError, match="nothing to rank"):
        rank(replace(subject, placement=subject.placement.following(plan)))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_workers")
def test_ray_gives_the_same_bits(prepared: Prepared, tmp_path: Path) -> None:
    subject = prepared.subject(2)
    local = rank(subject)
    rows = tmp_path / "rows.jsonl"
    remote = rank(subject, rows=rows, ray="local")
    assert [(one.name, one.score, one.distance) for one in remote.layers] == [
        (one.name, one.score, one.distance) for one in local.layers
    ]
    assert len(rows.read_text().splitlines()) == 1 + 96


def test_a_cluster_that_is_not_there_is_an_error(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendError, match=r"Ray is not installed here .*pip install 'trtdet\[ray\]'"):
        rank(prepared.subject(2), ray="local")
