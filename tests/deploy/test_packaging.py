"""Bundles that cannot be packaged, packages that are replaced, and the command."""

import json

import onnx
import pytest
from packages import refusal, repository, shape
from standin.triton.server import read_config

from trtdet import PackageOptions, TritonOptions, package
from trtdet.bundle import MANIFEST, BackendPart, MasksPart
from trtdet.cli import main
from trtdet.deploy import MARKER
from trtdet.errors import BundleError, ConfigError, OutputError
from trtdet.passes.base import PLUGIN_DOMAIN
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS


@pytest.mark.parametrize(("format", "whose"), [("triton", "Triton has no backend"), ("deepstream", "nvinfer has no")])
def test_an_engine_of_tensorrt_rtx_is_refused(remade, tmp_path, format, whose):
    bundle = remade(backend=BackendPart(name="tensorrt-rtx", version="1.7.1", sms=(86,)))
    text = refusal(bundle, tmp_path / "models", PackageOptions(format))
    assert f"engine of TensorRT-RTX, for which {whose}" in text
    assert "--backend tensorrt" in text


@pytest.mark.parametrize("name", ["", "a b", "../up", ".hidden", "Straße", "a/b"])
def test_a_name_that_is_no_folder_is_refused(remade, tmp_path, name):
    text = refusal(remade(), tmp_path / "models", PackageOptions("triton", name=name), ConfigError)
    assert f"'{name}' cannot be the name" in text
    assert "--name" in text


def test_options_of_triton_are_refused_elsewhere(remade, tmp_path):
    options = PackageOptions("deepstream", triton=TritonOptions())
    assert "are Triton's" in refusal(remade(), tmp_path / "ds", options, ConfigError)


@pytest.mark.parametrize("given", [{"queue_delay_us": -1}, {"cpu_instances": 0}])
def test_numbers_that_cannot_be_are_refused(given):
    with pytest.raises(ConfigError, match="the delay must be at least 0, and the processes at least 1"):
        TritonOptions(**given)


@pytest.mark.parametrize("format", ["triton", "deepstream"])
def test_masks_that_a_package_leaves_out_are_said(remade, tmp_path, format):
    bundle = remade(masks=MasksPart(output="masks", size=28, threshold=0.5))
    done = package(bundle, tmp_path / "models", PackageOptions(format))
    assert any(warning.startswith("masks are left out: ") for warning in done.warnings)
    assert "masks are left out: " in (done.folder / "README.md").read_text()


def test_an_altered_bundle_is_refused_and_what_stood_there_stays(remade, tmp_path):
    bundle = remade()
    folder = repository(bundle, tmp_path)
    before = (folder / MARKER).read_bytes()
    (bundle / "model.engine").write_bytes(b"another")
    with pytest.raises(BundleError, match="'model.engine' was altered"):
        repository(bundle, tmp_path)
    assert (folder / MARKER).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "models"]


def test_another_package_is_replaced_and_anything_else_is_not(remade, tmp_path):
    bundle = remade()
    folder = repository(bundle, tmp_path)
    package(bundle, folder, PackageOptions("deepstream"))
    assert (folder / "config_infer_primary.txt").is_file()
    assert not (folder / "shapes").exists()
    (folder / MARKER).unlink()
    with pytest.raises(OutputError, match="exists and is not a package of trtdet; choose another place"):
        repository(bundle, tmp_path)
    assert (folder / "config_infer_primary.txt").is_file()
    with pytest.raises(OutputError, match="is not a package of trtdet"):
        package(bundle, bundle, PackageOptions("triton"))
    assert (bundle / MANIFEST).is_file()


def test_operators_that_only_a_plugin_has_need_an_engine(made, remade, tmp_path):
    model = onnx.load(str(made.model))
    activation = next(node for node in model.graph.node if node.op_type in ("Sigmoid", "Relu"))
    activation.op_type, activation.domain = next(iter(PLUGIN_ACTIVATIONS)), PLUGIN_DOMAIN
    model.opset_import.append(onnx.helper.make_opsetid(PLUGIN_DOMAIN, 1))
    files = {"model.engine": b"", "fp32.onnx": model.SerializeToString()}
    bundle = remade(backend=made.manifest.backend, files=files)
    assert f"no operator {activation.op_type}; build it with --backend tensorrt" in refusal(
        bundle, tmp_path / "m", PackageOptions("triton")
    )


def test_a_type_that_triton_does_not_serve_is_refused(made, remade, tmp_path):
    odd = tuple(part.model_copy(update={"dtype": "float64"}) for part in made.manifest.outputs)
    assert "type float64 cannot be served" in refusal(remade(outputs=odd), tmp_path / "m", PackageOptions("triton"))


def test_the_command_says_what_it_wrote(remade, tmp_path, capsys):
    bundle, folder = remade(), tmp_path / "models"
    arguments = ["package", str(bundle), "-o", str(folder), "--format", "triton", "--name", "street", "--json"]
    assert main([*arguments, "--input", "pixels", "--queue-delay", "100", "--cpu-instances", "1"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["package"], found["format"]) == (str(folder), "triton")
    assert set(found) == {"package", "format", "files", "warnings"}
    assert all((folder / name).is_file() for name in found["files"])
    assert all(f"warning: {warning}" in captured.err for warning in found["warnings"])
    street = read_config(folder / "street")
    assert [shape(one) for one in street.input] == [("image", "TYPE_UINT8", [-1, -1, -1, 3])]
