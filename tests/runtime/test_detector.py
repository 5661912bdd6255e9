import json

from trtdet import CocoDataset, Detector, load_config, save_predictions
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL


def test_places_are_texts_as_well_as_paths(tmp_path):
    split = shapes.generate(str(tmp_path / "data"), "val", 2)
    config = load_config("shapes")
    detector = Detector.open(str(SHAPES_MODEL), config)
    dataset = CocoDataset.load(str(split.annotations), str(split.images), config.classes)
    assert CocoDataset.unannotated(str(split.images), config.classes).images[0].path == dataset.images[0].path
    saved = save_predictions(detector.predict([str(image.path) for image in dataset.images]), str(tmp_path / "out"))
    assert [path.name for path in saved.pictures] == ["000001.jpg", "000002.jpg"]
    assert all(json.loads(line)["detections"] for line in saved.detections.read_text().splitlines())
