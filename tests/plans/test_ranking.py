import json
import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from models import CONVOLUTIONS, SMALL_MODEL, own_labels

from trtdet import CocoDataset, evaluate, load_config, sensitivity
from trtdet.backends import OnnxRunner
from trtdet.building.corrections import prepared as prepare
from trtdet.building.graph import host_graph
from trtdet.building.ranges import calibrated, select_images
from trtdet.data import ImageStream
from trtdet.demo import shapes
from trtdet.errors import BackendError, ConfigError, TrtdetWarning
from trtdet.files.journal import Rows
from trtdet.options import CalibrationOptions, PlanOptions, SensitivityOptions, changed
from trtdet.plans.measuring import LayerRow, Method, Work, row_check, subject_key
from trtdet.plans.ranking import rank
from trtdet.plans.ranking import telling as telling_images
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import Entry, HeadError, PrecisionPlan, insert_qdq
from trtdet.quantization.macs import DEPTHWISE
from trtdet.runtime.detector import Detector

CONFIG = load_config("shapes")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 6).images


@pytest.fixture(scope="module")
def prepared(images):
    options = CalibrationOptions(rule="minmax", images=images)
    graph = replace(host_graph(SMALL_MODEL, CONFIG), int8_all=True)
    return prepare(calibrated(graph, options, select_images(options)), options, ())


@pytest.fixture(scope="module")
def reference(prepared):
    return rank(prepared.subject(3), Method("reference"))


def test_a_score_is_the_error_with_that_convolution_alone_in_int8(prepared, reference):
    subject = prepared.subject(3)
    float_model = OnnxRunner(prepared.model)
    for layer in (reference.layers[0], reference.layers[4]):
        entries = {
            name: Entry("int8" if name == layer.name else "fp32", "") for name in prepared.graph.placement.plan.entries
        }
        alone = insert_qdq(prepared.model, prepared.graph.placement.following(PrecisionPlan(entries)), prepared.ranges)
        runner, error = OnnxRunner(alone), HeadError()
        for batch in ImageStream(subject.images, subject.preprocess):
            one, other = float_model(batch.images), runner(batch.images)
            error.update((one["boxes"][0], one["scores"][0]), (other["boxes"][0], other["scores"][0]))
        assert layer.score == pytest.approx(error.power, rel=1e-4)
        assert layer.distance == pytest.approx(error.distance, rel=1e-4)


def test_every_convolution_is_ranked_once_and_depthwise_ones_as_a_group(reference):
    assert len(reference.layers) == CONVOLUTIONS
    assert [layer.rank for layer in reference.layers] == list(range(1, CONVOLUTIONS + 1))
    (group,) = reference.groups
    depthwise = [layer for layer in reference.layers if layer.depthwise]
    assert (group.name, group.rank, group.convs, group.depthwise) == (DEPTHWISE, 0, len(depthwise), True)
    assert group.macs == sum(layer.macs for layer in depthwise)
    assert group.score > depthwise[0].score * 0.5
    assert reference.distance == 0
    assert reference.inferences == 3 * (CONVOLUTIONS + 1 + 1)


def test_the_order_is_that_of_the_measured_rows(prepared, tmp_path):
    """Rows of a file in no order: ranks follow the scores, and equal scores the model."""
    subject, rows = prepared.subject(1), tmp_path / "rows.jsonl"
    names = list(subject.placement.plan.names("int8"))
    given = {name: float((7 * place) % 13) for place, name in enumerate([*names, DEPTHWISE])}
    rest = {"distance": 0.1, "map": None, "base_distance": 0.0, "base_map": None, "inferences": 1, "seconds": 0.5}
    lines = [{"name": name, "score": score, **rest} for name, score in given.items()]
    random.Random(0).shuffle(lines)
    with Rows(rows, subject_key(subject, Method())) as file:
        for line in lines:
            file.append(line)
    found = rank(subject, rows=rows)
    assert [layer.rank for layer in found.layers] == list(range(1, CONVOLUTIONS + 1))
    expected = sorted(names, key=lambda name: (-given[name], names.index(name)))
    assert [layer.name for layer in found.layers] == expected != names
    assert [layer.score for layer in found.layers] == [given[name] for name in expected]
    assert (found.seconds, found.inferences) == (0.5 * (CONVOLUTIONS + 1), CONVOLUTIONS + 1)


@pytest.mark.parametrize(
    "damage",
    [{"score": "much"}, {"score": None}, {"distance": [0.1]}, {"inferences": "1.5"}, {"seconds": {}}, {"map": "none"}],
)
def test_a_damaged_row_is_left_out_with_a_warning(tmp_path, damage):
    row = {"name": "a", "score": 1.0, "distance": 0.1, "map": None, "base_distance": 0.0, "base_map": None}
    row |= {"inferences": 1, "seconds": 0.5}
    check = row_check(LayerRow, tmp_path / "s.jsonl")
    assert check(row)
    key = next(iter(damage))
    with pytest.warns(TrtdetWarning, match=rf"s.jsonl': a row is damaged \('{key}': .*\) and is measured again"):
        assert not check({**row, **damage})
    with pytest.warns(TrtdetWarning, match=f"'{key}': field required"):
        assert not check({name: value for name, value in row.items() if name != key})


def test_a_damaged_file_of_rows_gives_the_same_ranking(prepared, tmp_path):
    subject, rows = prepared.subject(1), tmp_path / "rows.jsonl"
    whole = rank(subject, rows=rows)
    lines = rows.read_text().splitlines()
    damaged = json.loads(lines[3])
    lines[3] = json.dumps({**damaged, "score": "much"})
    lines[5] = "[" * 5000
    lines[7] = '{"name": 5}'
    rows.write_text("\n".join(lines) + "\n")
    with pytest.warns(TrtdetWarning, match="a row is damaged"):
        again = rank(subject, rows=rows)
    assert [(layer.name, layer.score) for layer in again.layers] == [
        (layer.name, layer.score) for layer in whole.layers
    ]


def test_the_fast_method_gives_the_same_numbers_for_the_images_it_takes(prepared, reference):
    subject = prepared.subject(3)
    fast = rank(subject)
    assert fast.images <= 3
    if fast.images == 3:
        expected = {layer.name: layer.score for layer in reference.layers}
        for layer in fast.layers:
            assert layer.score == pytest.approx(expected[layer.name], rel=1e-6, abs=1e-12)
    ours, theirs = ({layer.name for layer in one.layers[:5]} for one in (fast, reference))
    assert len(ours & theirs) >= 4


def test_the_fast_method_takes_the_fewest_images_that_hold_85_percent_of_what_is_detected(prepared):
    subject = prepared.subject(6)
    runner = OnnxRunner(prepared.model)
    weights = {}
    for path in subject.images:
        (batch,) = ImageStream([path], subject.preprocess)
        weights[path] = HeadError.weight(runner(batch.images)["scores"][0])
    heaviest = sorted(subject.images, key=lambda path: -weights[path])
    enough = next(
        count
        for count in range(1, len(heaviest) + 1)
        if sum(weights[path] for path in heaviest[:count]) >= 0.85 * sum(weights.values())
    )
    assert 1 < enough < 6
    assert rank(subject).images == enough
    assert set(telling_images(subject)) == set(heaviest[:enough])


def test_all_but_one(prepared):
    left = rank(prepared.subject(2), Method("fast", "int8"))
    assert left.base == "int8"
    assert left.distance > 0
    # Taking the worst one out takes error away; what is left of it with that one in float is less than all of it.
    assert left.layers[0].score > left.layers[-1].score
    assert left.layers[0].distance < left.distance
    (group,) = left.groups
    assert group.score > 0


def test_a_killed_run_goes_on_and_gives_the_same(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("trtdet.plans.measuring._TOGETHER", 3)
    subject = prepared.subject(2)
    rows = tmp_path / "rows.jsonl"
    whole = rank(subject, rows=rows)
    lines = rows.read_text().splitlines()
    assert len(lines) == 1 + CONVOLUTIONS + 1
    rows.write_text("\n".join(lines[:8]) + "\n" + lines[8][:30])
    seen: list[tuple[int, int]] = []
    again = rank(subject, rows=rows, progress=lambda stage, done, total: seen.append((done, total)))
    assert seen[0] == (6, CONVOLUTIONS + 1)
    assert [(one.name, one.score) for one in again.layers] == [(one.name, one.score) for one in whole.layers]
    kept = [json.loads(line) for line in rows.read_text().splitlines()]
    assert kept[:8] == [json.loads(line) for line in lines[:8]]
    assert sorted(row["name"] for row in kept[1:]) == sorted(json.loads(line)["name"] for line in lines[1:])
    with pytest.raises(ConfigError, match="another model, other images or other options"):
        rank(subject, Method("reference"), rows)


def test_map_is_measured_where_boxes_are_known(tmp_path, images):
    split = shapes.generate(tmp_path, "val", 3)
    labels = own_labels(split, tmp_path / "labels.json")
    options = SensitivityOptions(
        calibration=CalibrationOptions(rule="minmax", images=images),
        effort="none",
        plan=PlanOptions(rank_images=3, val_images=split.images, annotations=labels, int8_all=True),
    )
    found = sensitivity(SMALL_MODEL, CONFIG, options)
    dataset = CocoDataset.load(labels, split.images, CONFIG.classes)
    expected = evaluate(Detector.open(SMALL_MODEL, CONFIG), dataset).result.map
    assert found.map == pytest.approx(expected, abs=1e-9)
    assert found.images == 3
    assert all(layer.map is not None for layer in found.layers)
    assert any(layer.map != found.map for layer in found.layers)
    assert "mAP" in str(found.table())
    assert found.table(len(found.layers)).notes == ()
    assert found.table(len(found.layers) - 1).notes == ["1 more convolutions"]
    with pytest.raises(ConfigError, match="belong together"):
        sensitivity(SMALL_MODEL, CONFIG, changed(options, annotations=None))


def test_a_ranking_is_kept_and_read(reference, tmp_path):
    reference.save(tmp_path / "s.json")
    assert Sensitivity.load(tmp_path / "s.json") == reference
    (tmp_path / "cut.json").write_text((tmp_path / "s.json").read_text()[:100])
    with pytest.raises(ConfigError, match="cannot be used"):
        Sensitivity.load(tmp_path / "cut.json")
    whole = json.loads((tmp_path / "s.json").read_text())
    for name, text in {
        "deep": '{"schema": 1, "layers": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "list": "[]",
        "number": json.dumps({**whole, "macs": "many"}),
        "missing": json.dumps({key: value for key, value in whole.items() if key != "images"}),
        "layer": json.dumps({**whole, "layers": [{"name": "a"}]}),
        "bytes": "\udcff",
    }.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
        with pytest.raises(ConfigError, match=r"cannot be used \(.*\); measure it again") as raised:
            Sensitivity.load(tmp_path / name)
        assert "\n" not in str(raised.value)
    (tmp_path / "newer").write_text(json.dumps({**whole, "schema": 2}))
    with pytest.raises(ConfigError, match="'schema': input should be 1, got 2.*; measure it again"):
        Sensitivity.load(tmp_path / "newer")
    with pytest.raises(ConfigError, match="does not exist; measure it again with 'trtdet sensitivity'"):
        Sensitivity.load(tmp_path / "no.json")


def test_nothing_to_rank(prepared):
    subject = prepared.subject(2)
    with pytest.raises(ConfigError, match="needs images"):
        rank(replace(subject, images=()))
    plan = PrecisionPlan({name: Entry("fp32", "no") for name in subject.placement.plan.entries})
    with pytest.raises(ConfigError, match="nothing to rank"):
        rank(replace(subject, placement=subject.placement.following(plan)))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_workers")
def test_ray_gives_the_same_bits(prepared, tmp_path):
    subject = prepared.subject(2)
    local = rank(subject)
    rows = tmp_path / "rows.jsonl"
    remote = rank(subject, rows=rows, ray="local")
    assert [(one.name, one.score, one.distance) for one in remote.layers] == [
        (one.name, one.score, one.distance) for one in local.layers
    ]
    assert len(rows.read_text().splitlines()) == 1 + CONVOLUTIONS + 1


def test_a_cluster_that_is_not_there_is_an_error(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendError, match=r"Ray is not installed here .*pip install 'trtdet\[ray\]'"):
        rank(prepared.subject(2), ray="local")


@pytest.mark.parametrize(
    ("method", "mebibytes", "together"),
    [("fast", size, count) for size, count in ((0, 32), (1, 31), (8, 10), (32, 5), (200, 1), (2000, 1))]
    + [("reference", size, count) for size, count in ((0, 32), (16, 32), (32, 16), (300, 1), (2000, 1))],
)
def test_as_many_are_measured_together_as_a_gigabyte_of_weights_holds(method, mebibytes, together):
    """The model of each has the weights, twice, of those after it: of n convolutions n (n + 1) times their weights. By
    the reference method it is the whole network, whose convolutions share their weights here."""
    names = tuple(f"c{index}" for index in range(70))
    weights = SimpleNamespace(name="w", raw_data=range(mebibytes << 20))  # only its length is asked for
    nodes = [SimpleNamespace(name=name, input=["x", "w"]) for name in names]
    subject: Any = SimpleNamespace(model=SimpleNamespace(graph=SimpleNamespace(initializer=[weights], node=nodes)))
    members = (*((name, (name,)) for name in names), ("group", names[:2]))
    blocks = Work(subject, Method(method), members=members, threads=1).blocks()
    assert {len(block) for block in blocks[:-2]} == {together}
    assert blocks[-1] == ("group",) or method == "reference"
    assert sum(blocks, ()) == (*names, "group")
