import hashlib
import json
import re
import runpy
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exported import run

from trtdet.config import Config, HeadConfig, InputConfig, load_config
from trtdet.demo.shapes import generate
from trtdet.errors import ConfigError, ModelError, OutputError
from trtdet.exporter import SOURCES, ExportOptions, ExportReport, export

torch = pytest.importorskip("torch", reason="needs torch: pip install 'trtdet[export]'")

from trtdet.exporter import SHAPES_MODEL, convert, parity, trials, yolox  # noqa: E402

torch.set_num_threads(1)  # the networks are small, and spinning threads are slow where cores are shared


def _config(height: int = 64, width: int = 96, classes: int = 3, **head: Any) -> Config:
    return Config(
        name="own",
        classes=tuple(f"class {i}" for i in range(classes)),
        input=InputConfig(size=(height, width), name="pixels", scale=1 / 255, std=(0.5, 0.5, 0.5)),
        head=HeadConfig(decode="yolox", **head),
    )


def _dims(value: Any) -> list[Any]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_importing_does_not_import_torch():
    code = "import sys, trtdet.exporter; sys.exit('torch' in sys.modules or 'onnx' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_missing_torch_is_an_error_with_its_pip_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelError, match=re.escape("install it with: pip install 'trtdet[export]'")):
        export("shapes", tmp_path / "m.onnx")


def test_shapes_exports_its_shipped_weights(tmp_path, capfd):
    path = tmp_path / "folder" / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = export("shapes", path)
    assert capfd.readouterr() == ("", "")
    assert isinstance(report, ExportReport) and report.path == path and report.opset == 17
    assert report.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sorted(p.name for p in path.parent.iterdir()) == ["m.onnx", "m.parity.json", "m.yaml"]
    assert load_config(report.config or "") == load_config("shapes").model_copy(update={"name": "shapes"})
    said = json.loads(report.parity.read_text())
    assert said["source"] == "shapes" and said["sha256"] == report.sha256 and said["outputs"][0]["name"] == "output"
    assert list(said["versions"]) == ["trtdet", "onnxruntime", "torch"]
    (check,) = report.outputs
    assert (check.name, check.shape) == ("output", (1, 1344, 15))
    assert 0 < check.mean_abs < check.max_abs < 5e-3

    model = onnx.load(str(path))
    assert model.ir_version <= 10
    assert {n.op_type for n in model.graph.node} <= {
        *("Conv", "Sigmoid", "Mul", "Concat", "Add", "MaxPool", "Resize", "Slice", "Transpose", "Reshape", "Constant")
    }
    assert _dims(model.graph.input[0]) == [1, 3, 256, 256] and _dims(model.graph.output[0]) == [1, 1344, 15]
    images = np.random.default_rng(0).uniform(0, 255, (1, 3, 256, 256)).astype(np.float32)
    np.testing.assert_allclose(run(path, images=images)[0], run(SHAPES_MODEL, images=images)[0], atol=2e-3)


def test_dynamic_batch(tmp_path):
    path = tmp_path / "m.onnx"
    export("shapes", path, ExportOptions(dynamic_batch=True))
    model = onnx.load(str(path))
    assert _dims(model.graph.input[0]) == ["batch", 3, 256, 256]
    assert _dims(model.graph.output[0])[0] == "batch"
    images = np.random.default_rng(0).uniform(0, 255, (3, 3, 256, 256)).astype(np.float32)
    (three,) = run(path, images=images)
    (one,) = run(path, images=images[1:2])
    assert three.shape == (3, 1344, 15)
    np.testing.assert_allclose(three[1:2], one, atol=2e-3)


@pytest.mark.parametrize("opset", [11, 13, 20])
def test_opset_is_the_one_asked_for(tmp_path, opset):
    report = export("shapes", tmp_path / "m.onnx", ExportOptions(opset=opset))
    assert report.opset == opset == onnx.load(str(tmp_path / "m.onnx")).opset_import[0].version


def test_yolox_with_a_checkpoint_and_a_configuration(tmp_path):
    torch.manual_seed(5)
    trained = yolox.build("nano", 3)
    for module in trained.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2.0)
    torch.save({"model": trained.state_dict()}, tmp_path / "c.pth")
    config = _config(outputs=["head"])
    report = export("yolox-nano", tmp_path / "m.onnx", ExportOptions(weights=tmp_path / "c.pth", config=config))
    assert report.outputs[0].name == "head" and report.outputs[0].shape == (1, 8 * 12 + 4 * 6 + 2 * 3, 8)
    x = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        expected = trained(x)
    np.testing.assert_allclose(run(tmp_path / "m.onnx", pixels=x.numpy())[0], expected, atol=1e-4)
    ops = [n.op_type for n in onnx.load(str(tmp_path / "m.onnx")).graph.node]
    assert "BatchNormalization" not in ops


def test_yolox_without_weights_or_with_those_of_another_number_of_classes(tmp_path):
    with pytest.raises(ModelError, match=r"export of yolox-nano needs its weights.*--weights yolox_nano.pth"):
        export("yolox-nano", tmp_path / "m.onnx")
    torch.save(yolox.build("nano", 3).state_dict(), tmp_path / "c.pth")
    with pytest.raises(ModelError, match=r"head.cls_preds.0.weight \(3, 64, 1, 1\) for \(80, 64, 1, 1\)"):
        export("yolox-nano", tmp_path / "m.onnx", ExportOptions(weights=tmp_path / "c.pth"))
    assert not (tmp_path / "m.onnx").exists()
    report = export("yolox-nano", tmp_path / "m.onnx", ExportOptions(random_weights=True))
    assert report.outputs[0].shape == (1, 3549, 85)


def test_over_tolerance_nothing_is_written(tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(ModelError, match=r"output output differs from torch by [\d.e-]+, allowed is [\d.e-]+;"):
        export("shapes", path, ExportOptions(tolerance=1e-12))
    assert not list(tmp_path.iterdir())
    path.write_bytes(b"before")
    with pytest.raises(ModelError, match="differs from torch"):
        export("shapes", path, ExportOptions(tolerance=1e-12))
    assert path.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


def test_a_configuration_of_the_users_own_is_not_replaced(tmp_path):
    (tmp_path / "m.yaml").write_text("name: mine\n")
    with pytest.raises(OutputError, match=r"m.yaml' would be written .* give it with --config .*m.yaml if"):
        export("shapes", tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.yaml"]
    (tmp_path / "m.yaml").write_text("# Written by trtdet export of something else\nname: other\n")
    export("shapes", tmp_path / "m.onnx", ExportOptions(size=(64, 96)))
    assert load_config(tmp_path / "m.yaml").input.size == (64, 96)


def test_final_detections_are_compared_on_images(tmp_path):
    images = generate(tmp_path / "shapes", "val", 3).images
    report = export("shapes", tmp_path / "m.onnx", ExportOptions(images=images, dynamic_batch=True))
    check = report.detections
    assert check is not None and report.undetected == ""
    assert check.images == 5 and check.torch > 20  # three alone, two in a batch
    assert check.matched == check.torch == check.onnx and check.ties == 0
    assert 0 < check.max_score < 1e-4 and 0 < check.max_box < 0.05


def test_outputs_that_the_configuration_does_not_fit_are_exported_and_it_is_said(own):
    report = export(f"{own}:tensor", Path("m.onnx"), SMALL)
    assert report.detections is None and report.undetected.startswith("output 'output' has shape (1, 8, 1024)")


@pytest.mark.parametrize(("factor", "difference"), [(1.05, r"\d"), (np.nan, "nan")])
def test_a_wrong_graph_is_found(tmp_path, monkeypatch, factor, difference):
    whole = convert.to_onnx

    def damaged(*args: Any, **kwargs: Any) -> onnx.ModelProto:
        model = whole(*args, **kwargs)
        weight = next(t for t in model.graph.initializer if len(t.dims) == 4)
        values = onnx.numpy_helper.to_array(weight) * np.float32(factor)
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        return model

    monkeypatch.setitem(convert._EXPORTERS, "torchscript", damaged)
    with pytest.raises(ModelError, match=f"output output differs from torch by {difference}"):
        export("shapes", tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_images_have_the_range_that_the_network_sees():
    """Scale 1 / 255 and standard deviation 0.5: black is 0 and white is 2."""
    assert SMALL.config is not None
    for batch in trials.batches(SMALL.config.input, SMALL):
        assert (batch.min(), batch.max()) == (0, 2)


def test_the_largest_error_of_all_batches_is_reported():
    zero = np.zeros((1, 2), np.float32)
    errors = ([0.5, 0], [0.75, 0.25], [0.5, 0.5])
    pairs = [({"o": zero}, {"o": zero + np.array(error, np.float32)}) for error in errors]
    assert parity.compare_outputs("s", pairs, 1.0) == (parity.OutputCheck("o", (1, 2), 0.75, 0.5),)


def test_an_output_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        export("shapes", tmp_path / "file" / "m.onnx")


def test_options_out_of_range(tmp_path):
    with pytest.raises(ModelError, match=r"'yolo', allowed are yolox-nano, .*shapes, .*or package.module:factory"):
        export("yolo", tmp_path / "m.onnx")
    with pytest.raises(ConfigError, match="--opset is 10, allowed are 11 to 20"):
        export("shapes", tmp_path / "m.onnx", ExportOptions(opset=10))
    for tolerance in (0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="allowed is a finite number above 0"):
            export("shapes", tmp_path / "m.onnx", ExportOptions(tolerance=tolerance))
    with pytest.raises(ConfigError, match=r"input.size is \[72, 72\], shapes needs multiples of 32"):
        export("shapes", tmp_path / "m.onnx", ExportOptions(config=_config(72, 72, 10, strides=(8,))))
    assert len(SOURCES) == 7


def test_a_model_over_the_limit_keeps_its_weights_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "LARGEST", 1000)
    report = export("shapes", tmp_path / "m.onnx", ExportOptions(size=(64, 64)))
    assert report.external_data == tmp_path / "m.onnx.data"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data", "m.parity.json", "m.yaml"]
    assert (tmp_path / "m.onnx").stat().st_size < report.external_data.stat().st_size
    assert report.sha256 == hashlib.sha256((tmp_path / "m.onnx").read_bytes()).hexdigest()
    images = np.random.default_rng(0).uniform(0, 255, (1, 3, 64, 64)).astype(np.float32)
    (beside,) = run(tmp_path / "m.onnx", images=images)
    monkeypatch.undo()
    assert export("shapes", tmp_path / "n.onnx", ExportOptions(size=(64, 64))).external_data is None
    np.testing.assert_array_equal(beside, run(tmp_path / "n.onnx", images=images)[0])


def test_the_second_exporter_takes_what_the_first_cannot(own, monkeypatch):
    def failing(*args: Any, **kwargs: Any) -> onnx.ModelProto:
        raise RuntimeError("general advice") from ValueError("no ONNX form\nsecond line")

    report = export(f"{own}:tensor", Path("m.onnx"), SMALL)
    assert report.exporter == "torchscript" and report.notes == ()
    monkeypatch.setattr(convert, "_EXPORTERS", {"torchscript": failing, "dynamo": convert.to_onnx})
    report = export(f"{own}:tensor", Path("m.onnx"), SMALL)
    assert report.exporter == "dynamo"
    assert report.notes == ("written by torch's exporter dynamo, as torchscript: no ONNX form",)
    with pytest.raises(ModelError, match=r"failed in torch's exporter: torchscript: no ONNX form$"):
        export(f"{own}:tensor", Path("m.onnx"), replace(SMALL, exporter="torchscript"))
    monkeypatch.setattr(convert, "_EXPORTERS", {"torchscript": failing, "dynamo": failing})
    with pytest.raises(ModelError, match=r"exporter: torchscript: no ONNX form; dynamo: no ONNX form$"):
        export(f"{own}:tensor", Path("m.onnx"), SMALL)


@pytest.mark.parametrize("error", [OutputError("'/tmp' is too full for temporary files", ""), MemoryError()])
def test_a_full_disk_and_too_little_memory_are_no_reason_for_another_exporter(own, error, monkeypatch):
    def failing(*args: Any, **kwargs: Any) -> onnx.ModelProto:
        raise error

    monkeypatch.setattr(convert, "_EXPORTERS", {"torchscript": failing, "dynamo": convert.to_onnx})
    with pytest.raises(type(error)):
        export(f"{own}:tensor", Path("m.onnx"), SMALL)
    assert not Path("m.onnx").exists()


def test_a_missing_onnxscript_is_told(own, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModelError, match="dynamo: torch's newer exporter needs onnxscript.* pip install onnxscript"):
        export(f"{own}:tensor", Path("m.onnx"), replace(SMALL, exporter="dynamo"))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_dynamo_writes_the_same_detector(tmp_path, dynamic):
    pytest.importorskip("onnxscript", reason="torch's newer exporter: pip install onnxscript")
    options = ExportOptions(exporter="dynamo", dynamic_batch=dynamic, size=(64, 96))
    report = export("shapes", tmp_path / "m.onnx", options)
    assert (report.exporter, report.opset) == ("dynamo", 18)
    assert report.notes == ("opset 18 in place of 17, which dynamo does not write",)
    model = onnx.load(str(tmp_path / "m.onnx"))
    assert _dims(model.graph.input[0]) == ["batch" if dynamic else 1, 3, 64, 96]
    export("shapes", tmp_path / "n.onnx", replace(options, exporter="torchscript"))
    images = np.random.default_rng(0).uniform(0, 255, (2 if dynamic else 1, 3, 64, 96)).astype(np.float32)
    (found,), (expected,) = run(tmp_path / "m.onnx", images=images), run(tmp_path / "n.onnx", images=images)
    np.testing.assert_allclose(found, expected, atol=2e-3)


FACTORIES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.kind = kind

    def forward(self, x):
        y = self.bn(self.conv(x)).relu().flatten(2)
        return {
            "tensor": y,
            "pair": (y, y.mean(dim=1)),
            "listed": [y],
            "mapping": {"scores": y, "mean": y.mean(dim=1)},
            "nested": {"a": [y]},
            "number": 1.0,
            "empty": (),
        }[self.kind]

for kind in ("tensor", "pair", "listed", "mapping", "nested", "number", "empty"):
    globals()[kind] = lambda kind=kind: Net(kind).eval()
def training(): return Net("tensor")
def nothing(): return None
def raising(): raise RuntimeError("no such file\\nsecond line")
def one_batch():
    class One(nn.Module):
        def forward(self, x):
            return x.reshape(int(x.shape[0]), -1)
    return One().eval()
def double():
    class Double(nn.Module):
        def forward(self, x):
            places = torch.tensor([0.1, 0.2], dtype=torch.float64).expand(1, 2, 2, 2)
            for _ in range(int(x.shape[2]) // 16):
                places = places + x.mean().double()
            return nn.functional.grid_sample(x, places.to(x.dtype), align_corners=False), (x.sum((2, 3)).double() / 3)
    return Double().eval()
def infinite():
    class Infinite(nn.Module):
        def forward(self, x):
            return x / 0
    return Infinite().eval()
constant = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module in the current directory."""
    name = f"factories_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return name


SMALL = ExportOptions(config=_config(32, 32))


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        ("tensor", ["output"]),
        ("listed", ["output"]),
        ("pair", ["output_0", "output_1"]),
        ("mapping", ["scores", "mean"]),
    ],
)
def test_factory(own, factory, names):
    report = export(f"{own}:{factory}", Path("m.onnx"), SMALL)
    assert [o.name for o in report.outputs] == names
    assert report.outputs[0].shape == (1, 8, 1024)
    model = onnx.load("m.onnx")
    assert (model.graph.input[0].name, _dims(model.graph.input[0])) == ("pixels", [1, 3, 32, 32])
    assert [o.name for o in model.graph.output] == names
    assert "BatchNormalization" not in [n.op_type for n in model.graph.node]
    assert str(Path.cwd()) not in sys.path, "the import path is as it was"


def test_what_is_computed_in_float64_is_exported_in_float32(own):
    export(f"{own}:double", Path("m.onnx"), SMALL)
    graph = onnx.shape_inference.infer_shapes(onnx.load("m.onnx")).graph
    types = {value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    assert "GridSample" in {node.op_type for node in graph.node}
    assert onnx.TensorProto.DOUBLE not in types | {tensor.data_type for tensor in graph.initializer}


def test_factory_takes_output_names_weights_and_a_dynamic_batch(own):
    module = runpy.run_path(f"{own}.py")
    torch.save(module["pair"]().state_dict(), "c.pth")
    options = ExportOptions(weights=Path("c.pth"), config=_config(32, 32, outputs=["a", "b"]), dynamic_batch=True)
    report = export(f"{own}:pair", Path("m.onnx"), options)
    assert [(o.name, o.shape) for o in report.outputs] == [("a", (1, 8, 1024)), ("b", (1, 1024))]
    assert run(Path("m.onnx"), pixels=np.zeros((5, 3, 32, 32), np.float32))[1].shape == (5, 1024)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("absent", "has no 'absent'; it has .*empty"),
        ("constant", "is int, expected a function"),
        ("training", "training mode; call eval"),
        ("nothing", "gave NoneType, expected a torch.nn.Module"),
        ("raising", "raised RuntimeError: no such file$"),
        ("nested", "output a of the module is list, expected a tensor"),
        ("number", "the module gives float, expected a tensor"),
        ("empty", "gives no outputs"),
        ("infinite", "not finite in output output"),
        ("", "expected package.module:factory"),
    ],
)
def test_factory_errors(own, factory, message):
    with pytest.raises(ModelError, match=message):
        export(f"{own}:{factory}", Path("m.onnx"), SMALL)
    assert not Path("m.onnx").exists()


def test_factory_module_and_configuration_errors(own):
    with pytest.raises(ModelError, match=r"module 'absent_module' .* cannot be imported: ModuleNotFoundError"):
        export("absent_module:f", Path("m.onnx"), SMALL)
    with pytest.raises(ConfigError, match="give a configuration with --config"):
        export(f"{own}:tensor", Path("m.onnx"))
    with pytest.raises(ConfigError, match=r"head.outputs names 1 outputs, .* gives 2"):
        export(f"{own}:pair", Path("m.onnx"), ExportOptions(config=_config(32, 32, outputs=["a"])))
    with pytest.raises(ConfigError, match=r"head.outputs names a, .* gives scores, mean"):
        export(f"{own}:mapping", Path("m.onnx"), ExportOptions(config=_config(32, 32, outputs=["a"])))


def test_a_trace_that_froze_the_batch_is_found(own):
    export(f"{own}:one_batch", Path("m.onnx"), SMALL)
    dynamic = ExportOptions(config=SMALL.config, dynamic_batch=True)
    Path("m.onnx").unlink()
    with pytest.raises(ModelError, match=r"batch of 2|differs from torch|is .* in ONNX and .* in torch"):
        export(f"{own}:one_batch", Path("m.onnx"), dynamic)
    assert not Path("m.onnx").exists()


@pytest.mark.parametrize("source", ["best.pt", "folder/yolov5s.PT"])
def test_a_checkpoint_without_a_prefix_suggests_each(source, tmp_path):
    with pytest.raises(ModelError, match=rf"ultralytics:{source} .*yolov5:{source} of classic YOLOv5"):
        export(source, tmp_path / "m.onnx")


def test_what_a_checkpoint_says_is_printed_without_escapes(tmp_path, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("\x1b[31mred\x07")

    torch.save({}, tmp_path / "w.pth")
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(ModelError, match="cannot be read as weights only") as caught:
        export("yolox-nano", str(tmp_path / "m.onnx"), ExportOptions(weights=str(tmp_path / "w.pth")))
    assert str(caught.value).isprintable()
