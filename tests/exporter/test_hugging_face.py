"""Detectors of transformers. With ``pip install transformers`` those tests run too that build its networks; of the
others, tests/fixtures/rtdetr.onnx is an export that is committed."""

import importlib.util
import json
import os
import pickle
import runpy
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'trtdet[export]'")

from trtdet.backends import OnnxRunner  # noqa: E402
from trtdet.config import Config, InputConfig, load_config  # noqa: E402
from trtdet.detection.heads import decode  # noqa: E402
from trtdet.detection.suppression import non_max_suppression  # noqa: E402
from trtdet.errors import ConfigError, ModelError  # noqa: E402
from trtdet.exporter import ExportOptions, export, hugging_face, parity  # noqa: E402
from trtdet.passes import Options, load_model, rewrite  # noqa: E402

FIXTURE = Path(__file__).parent.parent / "fixtures" / "rtdetr.onnx"
needs_the_package = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="builds networks of transformers, which is not installed: pip install transformers",
)

PIXELS: dict[str, Any] = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
    "resample": 2,
    "size": {"height": 32, "width": 64},
}


def folder(place: Path, family: str = "rt_detr", **pixels: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({"model_type": family}))
    (place / "preprocessor_config.json").write_text(json.dumps(PIXELS | pixels))
    return place


class Detector(torch.nn.Module):
    """What a folder is loaded as: four queries, with logits of as many columns."""

    def __init__(self, names: list[str], columns: int) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(id2label=dict(enumerate(names)), num_queries=4)
        self.columns = torch.nn.Linear(3, columns)
        self.box = torch.nn.Linear(3, 4)

    def forward(self, pixel_values: Any) -> Any:
        rows = pixel_values[:, :, :2, :2].flatten(2).transpose(1, 2)
        return types.SimpleNamespace(logits=self.columns(rows), pred_boxes=self.box(rows).sigmoid(), other=None)


@pytest.fixture
def transformers(monkeypatch):
    """A package that loads ``package.model``, and keeps how it was asked to."""
    package: Any = types.ModuleType("transformers")
    utils: Any = types.ModuleType("transformers.utils")
    logging = {"get_verbosity": lambda: 0, "set_verbosity": print, "set_verbosity_error": lambda: None}
    bars = dict.fromkeys(("disable_progress_bar", "is_progress_bar_enabled"), lambda: False)
    utils.cached_file = lambda place, name, **_: None
    utils.logging = types.SimpleNamespace(**logging, **bars)
    package.loading = {"missing_keys": [], "mismatched_keys": []}
    package.asked = {}

    def loaded(place: str, **asked: Any) -> Any:
        package.asked.update(asked)
        return package.model, package.loading

    package.AutoModelForObjectDetection = types.SimpleNamespace(from_pretrained=loaded)
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.utils", utils)
    torch.manual_seed(0)
    package.model = Detector(["cat", "dog"], 2)
    return package  # type: ignore[no-any-return]


def written(place: Path, out: Path) -> Config:
    export(f"hf:{place}", out / "m.onnx")
    return load_config(out / "m.yaml")


def test_scores_of_a_sigmoid(transformers, tmp_path):
    config = written(folder(tmp_path / "mine"), tmp_path)
    assert (config.name, config.classes) == ("mine", ("cat", "dog"))
    assert (config.head.scores, config.head.background, config.head.columns) == ("logits", "none", None)
    assert (config.head.boxes, config.head.units) == ("cxcywh", "relative")
    assert not config.nms.suppresses
    assert (config.nms.max_detections, config.nms.candidates) == (4, "all-classes")
    assert config.input.size == (32, 64)
    assert (config.input.resize, config.input.interpolation, config.input.color) == ("stretch", "linear", "rgb")
    assert config.input.mean == (0.5, 0.4, 0.3)
    assert config.input.std == (0.2, 0.3, 0.4)
    assert config.input.scale == 1 / 255
    asked = transformers.asked
    assert (asked["trust_remote_code"], asked["weights_only"]) == (False, True)


@pytest.mark.parametrize("own", [None, "0"])
def test_shapes_are_not_compared_by_operators_while_the_newer_exporter_reads(transformers, tmp_path, monkeypatch, own):
    name = "TRANSFORMERS_DISABLE_TORCH_CHECK"
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    subject = hugging_face.load(str(folder(tmp_path / "mine")), ExportOptions())
    with subject.for_dynamo():
        assert os.environ[name] == "1"
    assert os.environ.get(name) == own


def test_scores_of_a_softmax_with_a_column_for_no_object(transformers, tmp_path):
    transformers.model = Detector(["cat", "dog"], 3)
    config = written(folder(tmp_path / "mine", "detr"), tmp_path)
    assert (config.head.scores, config.head.background, config.head.columns) == ("softmax", "last", None)
    assert config.nms.candidates == "best-class"


def test_columns_of_no_category_are_no_classes(transformers, tmp_path):
    transformers.model = Detector(["N/A", "cat", "N/A", "dog"], 5)
    config = written(folder(tmp_path / "mine", "detr"), tmp_path)
    assert config.classes == ("cat", "dog")
    assert (config.head.columns, config.head.background) == ((1, 3), "none")


@pytest.mark.parametrize(
    ("size", "expected", "resize"),
    [
        ({"shortest_edge": 33, "longest_edge": 65}, (64, 96), "letterbox-topleft"),
        ({"shortest_edge": 64, "longest_edge": 96}, (64, 96), "letterbox-topleft"),
        ({"max_height": 40, "max_width": 70}, (40, 70), "letterbox-topleft"),
    ],
)
def test_sizes_that_keep_the_shape_of_an_image(transformers, tmp_path, size, expected, resize):
    config = written(folder(tmp_path / "mine", size=size, do_normalize=False), tmp_path)
    assert (config.input.size, config.input.resize) == (expected, resize)
    assert config.input.std == (1, 1, 1)


def test_a_configuration_and_a_size_go_before_those_of_the_folder(transformers, tmp_path):
    place = folder(tmp_path / "mine", size=7)
    own = written(folder(tmp_path / "other"), tmp_path)
    done = export(f"hf:{place}", tmp_path / "n.onnx", ExportOptions(config=own, size=(64, 32)))
    assert done.config is None
    assert done.outputs[0].shape == (1, 4, 2)


def test_folders_that_are_refused(transformers, tmp_path):
    out = tmp_path / "m.onnx"
    place = folder(tmp_path / "mine", "vit")
    with pytest.raises(ModelError, match="is a model of type 'vit', allowed are conditional_detr, d_fine"):
        export(f"hf:{place}", out)
    for changes, said in (
        ({"size": 7}, "gives its input's size as 7; give a configuration with --config"),
        ({"resample": 1}, "resizes by Pillow's filter 1"),
        ({"image_std": None}, "gives image_std as None, expected three numbers"),
    ):
        with pytest.raises(ConfigError, match=said):
            export(f"hf:{folder(place, **changes)}", out)
    (folder(place) / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no preprocessor_config.json, which says what the pixels look like"):
        export(f"hf:{place}", out)
    with pytest.raises(ConfigError, match="reads the weights of its folder; leave --weights away"):
        export(f"hf:{place}", out, ExportOptions(weights=tmp_path / "w.pth"))
    transformers.loading["missing_keys"] = ["class_embed.weight"]
    with pytest.raises(ModelError, match="lacks 1 weights of the model, or has them in another shape: class_embed"):
        export(f"hf:{folder(place)}", out)
    (place / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"'config.json' of .* is list, expected an object"):
        export(f"hf:{place}", out)
    (place / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json; give a folder that save_pretrained wrote"):
        export(f"hf:{place}", out)
    with pytest.raises(ModelError, match=r"'an/id' is no folder here, and of that id the hub gives no config.json"):
        export("hf:an/id", out)
    assert not out.exists()


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match="needs transformers, which is not installed; install it with: pip install"):
        export(f"hf:{folder(tmp_path / 'mine')}", tmp_path / "m.onnx")


def test_position_embeddings_are_resized_once():
    class Resizing(torch.nn.Module):
        calls: ClassVar[list[tuple[int, int]]] = []

        def interpolate_pos_encoding(self, embeddings: Any, height: int, width: int) -> Any:
            self.calls.append((height, width))
            return embeddings + height

        def forward(self, pixel_values: Any) -> Any:
            return self.interpolate_pos_encoding(torch.zeros(2, requires_grad=True), *pixel_values.shape[2:])

    model = Resizing()
    hugging_face._keep_positions("s", model, InputConfig(size=(32, 64)))
    first = model(torch.zeros(1, 3, 32, 64))
    assert first is model(torch.ones(1, 3, 32, 64))
    assert not first.requires_grad
    assert Resizing.calls == [(32, 64)]


def test_rows_are_compared_in_the_order_in_which_they_are_nearest():
    rng = np.random.default_rng(0)
    expected = {"a": rng.normal(size=(2, 9, 3)), "b": rng.normal(size=(2, 9, 4))}
    orders = [rng.permutation(9) for _ in range(2)]
    found = {
        name: np.stack([rows[at] for rows, at in zip(side, orders, strict=True)]) for name, side in expected.items()
    }
    found["a"] += 1e-6
    again = parity.reordered(expected, found)
    for name, side in expected.items():
        np.testing.assert_allclose(again[name], side, atol=2e-6)
    shorter = {name: side[:, :8] for name, side in found.items()}
    with pytest.raises(ModelError, match=r"output a is \(2, 8, 3\) in ONNX and \(2, 9, 3\) in torch"):
        parity.compare_outputs("s", [(expected, parity.reordered(expected, shorter))], 1e-3)


def test_the_best_queries_are_taken_in_the_graph():
    """An RT-DETR of transformers: what the rewritten model gives is what the references make of its raw outputs."""
    config, model = load_config(FIXTURE.with_suffix(".yaml")), load_model(FIXTURE)
    image = np.random.default_rng(2).uniform(0, 1, (1, 3, *config.input.size)).astype(np.float32)
    raw = OnnxRunner(model)(image)
    expected = non_max_suppression(*decode(raw, config), config.nms, logits=config.suppresses_logits)
    done = rewrite(model, Options(config, "native"))
    assert all(node.op_type not in ("Loop", "NonMaxSuppression") for node in done.model.graph.node)
    found = OnnxRunner(done.model)(image)
    assert found["num_dets"].item() == expected.num_dets.item() == 12
    np.testing.assert_array_equal(found["classes"], expected.classes)
    np.testing.assert_allclose(found["boxes"], expected.boxes, atol=1e-3)
    np.testing.assert_allclose(found["scores"], expected.scores, atol=1e-5)


@pytest.mark.slow
@needs_the_package
def test_a_detector_of_the_package(tmp_path):
    make = runpy.run_path(str(FIXTURE.with_suffix(".py")))
    make["save"](make["build"](), tmp_path / "rtdetr")
    done = export(f"hf:{tmp_path / 'rtdetr'}", tmp_path / "m.onnx", ExportOptions(dynamic_batch=True))
    assert done.detections is not None
    assert done.detections.torch == done.detections.matched == 12 * 4
    assert load_config(tmp_path / "m.yaml") == load_config(FIXTURE.with_suffix(".yaml"))


class _Hostile:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("run-by-a-pickle"),)


@pytest.mark.slow
@needs_the_package
def test_a_folder_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make = runpy.run_path(str(FIXTURE.with_suffix(".py")))
    place = tmp_path / "rtdetr"
    make["save"](make["build"](), place)
    (place / "model.safetensors").unlink()
    for content in ({"a": _Hostile()}, {"a": torch.zeros(1), "b": _Hostile()}):
        torch.save(content, place / "pytorch_model.bin")
        with pytest.raises(ModelError, match="cannot be loaded"):
            export(f"hf:{place}", tmp_path / "m.onnx")
    (place / "pytorch_model.bin").write_bytes(pickle.dumps(_Hostile()))
    with pytest.raises(ModelError, match="cannot be loaded"):
        export(f"hf:{place}", tmp_path / "m.onnx")
    settings = json.loads((place / "config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "code.C", "AutoModelForObjectDetection": "code.M"}
    (place / "config.json").write_text(json.dumps(settings))
    (place / "code.py").write_text("from pathlib import Path\nPath('run-by-a-module').touch()\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        export(f"hf:{place}", tmp_path / "m.onnx")
    assert not list(tmp_path.glob("run-by-*"))
