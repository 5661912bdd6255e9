"""Forms of the INT8 network among the candidates, and their table."""

import onnx
import pytest
from models import small_detector

from trtdet import CalibrationOptions, load_config
from trtdet.candidates import prepare, preparing
from trtdet.candidates.folder import Accuracy, Candidate, candidates_table
from trtdet.demo import shapes
from trtdet.errors import BundleError
from trtdet.evaluation.comparison import PartScore
from trtdet.options import BuildOptions, PlanOptions, PrepareOptions


def prepared(place, points=0, plan=PlanOptions()):
    onnx.save(small_detector(width=32), place / "model.onnx")
    images = shapes.generate(place, "calibration", 6).images
    calibration = CalibrationOptions(rule="minmax", images=images, num_images=3)
    build = BuildOptions(effort="none", calibration=calibration, plan=plan)
    options = PrepareOptions(target="tensorrt-10.3", points=points, build=build)
    return prepare(place / "model.onnx", load_config("shapes"), place / "prepared", options)


@pytest.fixture
def folder(tmp_path):
    return prepared(tmp_path)


def test_layers_are_ranked_on_as_many_images_as_are_asked_for(tmp_path, monkeypatch):
    taken = []

    def ranking(ranked, options, **others):
        taken.append(len(ranked.subject(options.rank_images).images))
        return preparing_ranking(ranked, options, **others)

    preparing_ranking = preparing.ranking
    monkeypatch.setattr(preparing, "ranking", ranking)
    prepared(tmp_path, points=1, plan=PlanOptions(rank_images=2))
    assert taken == [2]


def test_forms_that_change_the_network_are_candidates(folder):
    """This model has no sums and joins of features, and its first convolution is in FP16 already."""
    candidates = {one.name: one for one in folder.content.candidates}
    assert [name for name in candidates if name.startswith("default")] == ["default", "default-first-in-int8"]
    assert candidates["default-first-in-int8"].int8_share > candidates["default"].int8_share
    model = folder.model(candidates["default-first-in-int8"])
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    assert makers[first.input[0]] == "DequantizeLinear"
    assert folder.manifest(candidates["default-first-in-int8"]).quantization.weight_scales == "channel"
    (folder.path / "default.manifest.json").write_bytes(b"{}")
    with pytest.raises(BundleError, match="is no manifest .*; run 'trtdet prepare' again"):
        folder.manifest(candidates["default"])
    (folder.path / "default.onnx").write_bytes(b"garbage")
    with pytest.raises(BundleError, match="is no network .*; run 'trtdet prepare' again"):
        folder.model(candidates["default"])


@pytest.mark.parametrize(("figure", "column"), [("map", "mAP"), ("agreement", "agreement")])
def test_the_table_has_accuracy_in_points_and_why_a_candidate_may_not_ship(figure, column):
    masks = PartScore(map=0.4, difference=-0.02, low=-0.03, high=-0.01)
    accuracy = Accuracy(figure, value=0.456, difference=-0.015, low=-0.02, high=-0.01, images=9, parts={"masks": masks})
    candidate = Candidate("default", "by default", "int8", {}, False, None, 0.75, accuracy, refused="it loses 1.50")
    (row,) = candidates_table((candidate,)).as_dicts()
    assert (row["candidate"], row["multiply-adds in INT8"], row["network"]) == ("default", 0.75, "by default")
    assert row[column] == pytest.approx(45.6)
    assert row["against FP32 (90 % interval)"].startswith("-1.50") and row["masks"].startswith("-2.00")
    assert row[""] == "may not ship: it loses 1.50"
