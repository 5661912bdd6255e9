import json
import os
from pathlib import Path
from typing import Any

import pytest

from trtdet.bundle import (
    MANIFEST,
    AuditPart,
    BackendPart,
    Bundle,
    BundleWriter,
    CountsPart,
    DetectionParts,
    FloatConvPart,
    ImagesPart,
    InputPart,
    MasksPart,
    ModelPart,
    NmsPart,
    OutputPart,
    PluginPart,
    QuantizationPart,
    ShapePart,
)
from trtdet.config import load_config, shipped
from trtdet.errors import BundleError, OutputError
from trtdet.files import sha256_file, write_atomically

CONFIG = load_config("yolox")
FIELDS: dict[str, Any] = {
    "trtdet_version": "0.0",
    "model": ModelPart(sha256="0" * 64, name="mine", classes=("cat", "dog")),
    "input": InputPart(
        name="images",
        shape=ShapePart(min=(1, 3, 416, 416), opt=(4, 3, 416, 416), max=(8, 3, 416, 416)),
        dtype="float32",
        preprocess=CONFIG.input,
    ),
    "outputs": (OutputPart(name="num_dets", dtype="int32", shape=("batch", 1)),),
    "nms": NmsPart(where="native", **CONFIG.nms.model_dump()),
    "backend": BackendPart(name="tensorrt-rtx", version="1.7", sms=(86, 89)),
    "quantization": QuantizationPart(
        mode="explicit",
        calibrator="percentile",
        percentile=99.99,
        histograms_key="k",
        images=ImagesPart(count=2, sha256="1" * 64, skipped=("bad.jpg",)),
    ),
    "precision": CountsPart(int8=2, fp16=0, fp32=1),
    "audit": AuditPart(int8=1, fp16=0, fp32=2, float_by_backend=(FloatConvPart(name="c", got="fp32", reason="r"),)),
    "command": {"precision": "int8", "images": None},
    "content_hash": "2" * 64,
}
PARTS: dict[str, Any] = {
    "masks": {"coefficients": "mask_coefficients", "prototypes": "prototypes", "threshold": 0.5},
    "keypoints": {"output": "keypoints", "names": ["a", "b"], "sigmas": [0.5, 0.5], "skeleton": [[0, 1]]},
    "rotated_boxes": {"output": "rotated_boxes"},
}
READS = "this trtdet reads schemas 1 and 2"


def make(path: Path, engine: bytes = b"engine", **fields: Any) -> Bundle:
    with BundleWriter(path) as writer:
        writer.add("model.engine", engine)
        writer.add("int8.onnx", b"onnx" * 1000)
        return writer.commit(FIELDS | fields)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Reading


def test_what_was_written_is_read(tmp_path):
    written = make(tmp_path / "deep" / "bundle")
    read = Bundle(tmp_path / "deep" / "bundle")
    assert (read.manifest, read.engine) == (written.manifest, tmp_path / "deep" / "bundle" / "model.engine")
    assert read.model.read_bytes() == b"onnx" * 1000
    assert read.file("int8.onnx") == read.model
    assert read.manifest.input.preprocess == CONFIG.input
    assert read.manifest.outputs[0].shape == ("batch", 1)
    assert sorted(path.name for path in tmp_path.glob("deep/*")) == ["bundle"]


def test_the_manifest_has_every_key_of_the_contract_and_schema_comes_first(tmp_path):
    make(tmp_path / "bundle")
    data = json.loads((tmp_path / "bundle" / MANIFEST).read_text())
    assert next(iter(data)) == "schema" and data["schema"] == 1
    contract = (
        "schema trtdet_version created model input outputs nms backend quantization precision audit files command"
    )
    assert set(contract.split()) <= set(data)
    assert {"sha256", "name", "classes"} <= set(data["model"])
    assert {"name", "shape", "dtype", "preprocess"} <= set(data["input"])
    assert set(data["input"]["shape"]) == {"min", "opt", "max"}
    assert {"where", "score_threshold", "iou_threshold", "max_detections", "class_agnostic"} <= set(data["nms"])
    assert {"name", "version", "sms", "plugins"} <= set(data["backend"])
    assert {"mode", "calibrator", "percentile", "images", "corrections"} <= set(data["quantization"])
    assert {"count", "sha256"} <= set(data["quantization"]["images"])
    assert {"int8", "fp16", "fp32"} == set(data["precision"])
    assert {"int8", "fp8", "fp16", "fp32", "float_by_backend"} == set(data["audit"])
    assert data["files"] == {name: sha256_file(tmp_path / "bundle" / name) for name in ("model.engine", "int8.onnx")}
    assert data["input"]["preprocess"]["size"] == [416, 416]
    assert data["created"].endswith("+00:00")


def test_masks_are_a_part_of_their_own(tmp_path):
    assert make(tmp_path / "boxes").manifest.masks is None
    part = MasksPart(output="masks", size=28, threshold=0.5)
    make(tmp_path / "masks", masks=part)
    assert Bundle(tmp_path / "masks").manifest.masks == part
    data = json.loads((tmp_path / "masks" / MANIFEST).read_text())
    assert data["masks"] == {"output": "masks", "size": 28, "threshold": 0.5}


@pytest.mark.parametrize("names", [("masks",), ("keypoints",), ("rotated_boxes",), tuple(PARTS)])
def test_parts_of_one_stage_detectors_make_schema_2(tmp_path, names):
    parts = {name: PARTS[name] for name in names}
    written = make(tmp_path / "bundle", parts=DetectionParts.model_validate(parts))
    assert Bundle(tmp_path / "bundle").manifest == written.manifest
    data = json.loads((tmp_path / "bundle" / MANIFEST).read_text())
    assert data["schema"] == 2 and data["parts"] == parts


def test_plain_boxes_keep_schema_1_and_its_keys(tmp_path):
    make(tmp_path / "bundle", command={"config": CONFIG.model_dump(mode="json")})
    data = json.loads((tmp_path / "bundle" / MANIFEST).read_text())
    assert data["schema"] == 1 and "parts" not in data
    assert not {"masks", "keypoints", "rotated"} & set(data["command"]["config"]["head"])


@pytest.mark.parametrize("position", [0, 1999, 3999])
def test_one_altered_byte_is_found(tmp_path, position):
    make(tmp_path / "bundle")
    path = tmp_path / "bundle" / "int8.onnx"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"'int8\.onnx' was altered: sha256 .* where the manifest says"):
        Bundle(tmp_path / "bundle")
    assert Bundle(tmp_path / "bundle", verify=False).manifest.model.name == "mine"


def test_a_missing_file_is_named(tmp_path):
    make(tmp_path / "bundle")
    (tmp_path / "bundle" / "model.engine").unlink()
    with pytest.raises(BundleError, match=r"lacks 'model\.engine'; build it again"):
        Bundle(tmp_path / "bundle")


def test_a_file_the_bundle_never_had_is_an_error_that_lists_the_others(tmp_path):
    with pytest.raises(BundleError, match=r"has no 'plan\.json'; it holds int8\.onnx, model\.engine"):
        make(tmp_path / "bundle").file("plan.json")


@pytest.mark.parametrize("name", shipped("configs"))
def test_the_configuration_it_was_built_with_comes_back(tmp_path, name):
    config = load_config(name).with_nms(iou_threshold=0.5)
    make(tmp_path / "b", command={"config": config.model_dump(mode="json")})
    assert Bundle(tmp_path / "b").config == config


def test_a_bundle_that_lacks_its_configuration_says_so(tmp_path):
    with pytest.raises(BundleError, match="manifest.json' lacks the configuration .*; build it again"):
        _ = make(tmp_path / "b").config


def test_a_bundle_without_engine_says_none(tmp_path):
    with BundleWriter(tmp_path / "bundle") as writer:
        writer.add("fp32.onnx", b"x")
        assert writer.commit(FIELDS).engine is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({"schema": schema}, f"; {READS}; build the bundle again") for schema in (3, 0, "1", None)),
        ({"schema": ...}, f"'schema': field required; {READS}; build the bundle again"),
        ({"schema": 2}, "is not a manifest: schema 2 lacks key 'parts'; build the bundle again"),
        ({"parts": PARTS}, "is not a manifest: schema 1 must not have key 'parts'; build the bundle again"),
        ({"schema": 2, "parts": {}}, "'parts': has none of masks, keypoints and rotated_boxes"),
        ({"schema": 2, "parts": PARTS | {"depth": {}}}, "'parts.depth': extra inputs are not permitted"),
        (
            {"schema": 2, "parts": PARTS, "masks": {"output": "masks", "size": 28, "threshold": 0.5}},
            "has key 'masks' of a two-stage detector and key 'parts' of a one-stage detector",
        ),
        ({"nms": {}}, "is not a manifest: 'nms.where': field required; build the bundle again"),
    ],
)
def test_a_key_of_the_manifest_that_is_wrong_is_named(tmp_path, change, words):
    path = make(tmp_path / "bundle").path / MANIFEST
    data = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    with pytest.raises(BundleError) as caught:
        Bundle(tmp_path / "bundle")
    assert words in str(caught.value)


NO_JSON = "is not a manifest: Invalid JSON: .*; build the bundle again"
NO_OBJECT = "is not a manifest: Input should be an object; build the bundle again"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *((data, NO_JSON) for data in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1, "x": "\\ud800"}')),
        *((data, NO_OBJECT) for data in (b"[]", b"3", b"null")),
    ],
)
def test_a_manifest_that_is_no_json_object_is_an_error(tmp_path, data, words):
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(BundleError, match=words) as caught:
        Bundle(tmp_path)
    assert len(str(caught.value)) < 500


def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(BundleError, match="manifest.json' cannot be read: Is a directory; check the file"):
        Bundle(tmp_path)


def test_a_folder_whose_name_is_no_text_is_named_in_a_manifest_that_can_be_read(tmp_path):
    """File names are bytes; Python makes half surrogate pairs of those that are no UTF-8."""
    make(tmp_path / "bundle", command={"images": os.fsdecode(b"/im\xffages/\xc3\xa9"), "list": ["\ud800"]})
    command = Bundle(tmp_path / "bundle").manifest.command
    assert command == {"images": "/im\\udcffages/é", "list": ["\\ud800"]}


def test_keys_that_have_another_name_in_python_keep_theirs_in_the_file(tmp_path):
    make(tmp_path / "bundle", nms=NmsPart(where="host", own=True, **CONFIG.nms.model_dump()))
    data = json.loads((tmp_path / "bundle" / MANIFEST).read_text())
    assert (data["nms"]["where"], data["nms"]["own"], data["schema"]) == ("host", True, 1)
    assert not {"mode", "embedded", "schema_"} & {*data, *data["nms"]}
    read = Bundle(tmp_path / "bundle").manifest.nms
    assert (read.mode, read.embedded, read.thresholds) == ("host", True, CONFIG.nms)


def test_what_is_not_a_bundle_says_how_to_make_one(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (tmp_path, tmp_path / "absent", file):
        with pytest.raises(
            BundleError, match=r"is not a bundle: it has no manifest\.json; make a bundle with 'trtdet build'"
        ):
            Bundle(path)


# Writing


def test_a_bundle_replaces_an_older_one_and_an_empty_folder(tmp_path):
    place = tmp_path / "bundle"
    place.mkdir()
    make(place, b"one")
    (place / "notes.txt").write_text("of the older one")
    make(place, b"two")
    assert Bundle(place).file("model.engine").read_bytes() == b"two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]
    assert not (place / "notes.txt").exists()


@pytest.mark.parametrize(
    ("file", "place", "words"),
    [
        ("photos/cat.jpg", "photos", "exists and is not a bundle; choose another place with -o or remove it"),
        ("file", "file", "exists and is not a bundle"),
        ("file", "file/bundle", "cannot be written: .*; choose another place with -o"),
    ],
)
def test_a_place_that_is_no_bundle_is_refused_and_untouched(tmp_path, file, place, words):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(OutputError, match=words):
        make(tmp_path / place)
    assert contents(tmp_path) == {file: b"x"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_exception_inside_the_block_leaves_the_old_bundle_and_nothing_else(tmp_path, error):
    make(tmp_path / "bundle", b"old")
    before = contents(tmp_path)
    with pytest.raises(error), BundleWriter(tmp_path / "bundle") as writer:
        writer.add("model.engine", b"new")
        raise error
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_leaving_without_commit_writes_nothing(tmp_path):
    with BundleWriter(tmp_path / "bundle") as writer:
        writer.add("model.engine", b"new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_leaves_the_old_bundle_and_nothing_else(tmp_path, full_disk, late):
    make(tmp_path / "bundle", b"old")
    before = contents(tmp_path)
    if not late:  # full when the manifest comes, or from the first file on
        full_disk()
    message = "No space left on device; the old content is untouched"
    with pytest.raises(OutputError, match=message), BundleWriter(tmp_path / "bundle") as writer:
        writer.add("model.engine", b"new")
        full_disk()
        writer.commit(FIELDS)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


# Adding


def test_a_file_is_added_and_replaced_and_verified(tmp_path):
    bundle = make(tmp_path / "b")
    created = bundle.manifest.created
    bundle.add("worth.json", b"one")
    assert Bundle(tmp_path / "b").file("worth.json").read_bytes() == b"one"
    bundle.add("worth.json", b"another")
    read = Bundle(tmp_path / "b")
    assert read.file("worth.json").read_bytes() == b"another"
    assert (read.manifest, read.manifest.created) == (bundle.manifest, created)
    assert sorted(read.manifest.files) == ["int8.onnx", "model.engine", "worth.json"]
    (tmp_path / "b" / "worth.json").write_bytes(b"altered")
    with pytest.raises(BundleError, match="'worth.json' was altered"):
        Bundle(tmp_path / "b")


def test_while_a_file_is_replaced_the_bundle_is_valid_at_every_moment(tmp_path, monkeypatch):
    bundle = make(tmp_path / "b")
    written: list[str] = []

    def write_and_look(path: Path, data: bytes) -> None:
        write_atomically(path, data)
        Bundle(tmp_path / "b")
        written.append(path.name)

    monkeypatch.setattr("trtdet.bundle.write_atomically", write_and_look)
    bundle.add("worth.json", b"one")
    assert written == ["worth.json", MANIFEST]
    bundle.add("worth.json", b"another")
    assert written[2:] == [MANIFEST, "worth.json", MANIFEST]


def test_plugins_are_in_the_engine_or_loose():
    loose, embedded = PluginPart(file="a.so", sha256="0"), PluginPart(file="b.so", sha256="0", embedded=True)

    def backend(*plugins: PluginPart) -> BackendPart:
        return BackendPart(name="tensorrt-rtx", version="1.7", sms=(86,), plugins=plugins)

    assert (backend(loose, embedded).loose_plugins, backend(loose, embedded).carries_plugins) == (("a.so",), True)
    assert (backend(loose).loose_plugins, backend(loose).carries_plugins) == (("a.so",), False)
    assert (backend().loose_plugins, backend().carries_plugins) == ((), False)
    assert AuditPart(int8=1, fp16=0, fp32=0).fp8 == 0


def test_a_disk_that_is_full_leaves_the_bundle_as_it_was(tmp_path, full_disk):
    bundle = make(tmp_path / "b")
    before = contents(tmp_path)
    full_disk()
    with pytest.raises(OutputError, match="No space left on device"):
        bundle.add("worth.json", b"one")
    assert contents(tmp_path) == before
    assert Bundle(tmp_path / "b").manifest == bundle.manifest


# Names


@pytest.mark.parametrize("name", ["../other.onnx", "/dev/zero", "", ".", "..", "in/side", "manifest.json", "zero\0"])
@pytest.mark.parametrize("where", ["files", "portable", "plugin"])
def test_the_manifest_names_no_file_outside_of_the_folder(tmp_path, name, where):
    bundle = make(tmp_path / "bundle", portable="int8.onnx").path
    (tmp_path / "other.onnx").write_bytes(b"other")
    data = json.loads((bundle / MANIFEST).read_text())
    if where == "files":
        data["files"][name] = "0" * 64
    elif where == "portable":
        data["portable"] = name
    else:
        data["backend"]["plugins"] = [{"file": name, "sha256": "0" * 64}]
    (bundle / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(BundleError, match=r"is not a manifest: .*is no name of a file in the bundle's folder"):
        Bundle(bundle, verify=False)


def test_a_pipe_is_not_waited_for(tmp_path):
    bundle = make(tmp_path / "bundle").path
    (bundle / "model.engine").unlink()
    os.mkfifo(bundle / "model.engine")
    with pytest.raises(BundleError, match="'model.engine' is no regular file; build it again"):
        Bundle(bundle)
