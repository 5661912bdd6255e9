"""The kinds of inputs of ``fuzz.py``: sound ones, how they are changed, and the function of trtdet that reads each.

A change takes bytes and gives bytes, so that a guided fuzzer can use it too. What an input is read by, where several
commands read it, follows from its bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from PIL import Image
from pydantic import ValidationError

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("", "passes", "building")]

from mutations import MUTATIONS, detector  # noqa: E402
from odd_networks import CONFIG as ODD_CONFIG  # noqa: E402
from odd_networks import NETWORKS  # noqa: E402
from signing import pair  # noqa: E402
from tiny_detector import CLASSES, CONFIG, tiny_detector  # noqa: E402

import trtdet  # noqa: E402
from trtdet.calibration import Collection, Ranges, cache  # noqa: E402
from trtdet.candidates import PreparedFolder  # noqa: E402
from trtdet.config import Config, load_config  # noqa: E402
from trtdet.data import find_images  # noqa: E402
from trtdet.data.images import preprocess, read_image  # noqa: E402
from trtdet.detection import expressions  # noqa: E402
from trtdet.detection.masks import run_lengths  # noqa: E402
from trtdet.errors import ConfigError, TrtdetError  # noqa: E402
from trtdet.evaluation.metrics import CocoMetric  # noqa: E402
from trtdet.evaluation.parts import FoundParts  # noqa: E402
from trtdet.options import BuildOptions, setting  # noqa: E402
from trtdet.passes import Options, embedded_nms, load_model, rewrite  # noqa: E402
from trtdet.quantization import PrecisionPlan  # noqa: E402

Change = Callable[[bytes, random.Random], bytes]

TASKS = {
    "masks": {"outputs": ["boxes", "scores", "coefficients", "prototypes"], "masks": True},
    "keypoints": {
        "outputs": ["boxes", "scores", "points"],
        "keypoints": {"names": ["a", "b"], "sigmas": [0.1, 0.2], "skeleton": [[0, 1]]},
    },
    "rotated": {"outputs": ["boxes", "scores", "angles"], "rotated": True},
}
"""Keys of the head of :func:`parts_detector`, by what it gives beside boxes."""

# fmt: off
ODD_NUMBERS = (
    0, -1, 1, 2**31, -(2**31), 2**63, 2**64, 10**40, 1e308, -1e-308, 0.5, float("nan"), float("inf"),
)
ODD_TEXTS = (
    "", " ", "a\nb", "a\x1b[31mb", "\x00", "\u2028", "\ud800", "x" * 5000, "../../outside", "/dev/zero", ".",
    "\x9b31m", "nan", "1e999", "-1", "true", "null", "'", '"', "%s", "{}", "${HOME}", "\N{RIGHT-TO-LEFT OVERRIDE}",
)
# fmt: on
LARGEST = 200_000
"""Most bytes of a changed input."""


class Refused(Exception):
    """A command ended with an error; the text is all that it printed on standard error."""


@dataclass(frozen=True)
class Kind:
    """A kind of inputs.

    Attributes:
        seeds: sound inputs, from the folder of the material.
        change: makes another input of one.
        read: reads an input, given as bytes, in an empty folder; ``material`` has what it needs beside.
        count: how many of 102,000 inputs.
    """

    name: str
    seeds: Callable[[Path], list[bytes]]
    change: Change
    read: Callable[[bytes, Path, Path], None]
    count: int


def choice(data: bytes, count: int) -> int:
    """A number below ``count`` that follows from the bytes."""
    return zlib.crc32(data) % count


# Commands


def command(*words: object) -> None:
    """Runs a command in this process; raises Refused if it ends with an error of its own."""
    from trtdet.cli import main

    out, err = io.StringIO(), io.StringIO()
    code: object
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
    for line in out.getvalue().splitlines():
        if not all(character.isprintable() or character == "\t" for character in line):
            raise AssertionError(f"standard output has control characters: {ascii(line)[:300]}")
    if code:
        raise Refused(err.getvalue())


def parts_detector() -> onnx.ModelProto:
    """The tiny detector with mask coefficients and prototypes, two keypoints and an angle for each of its 64 boxes."""
    model = tiny_detector()
    rng = np.random.default_rng(3)
    arrays = {"w_rows": rng.normal(0, 0.3, (11, 8, 1, 1)), "w_maps": rng.normal(0, 0.3, (4, 8, 1, 1))}
    arrays |= {"rows_shape": np.array([1, 11, 64]), "rows_parts": np.array([4, 6, 1])}
    for name, array in arrays.items():
        typed = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(onnx.numpy_helper.from_array(typed, name))
    for op, sources, results, attributes in (
        ("Conv", ["depthwise_1", "w_maps"], ["prototypes"], {}),
        ("Conv", ["depthwise_1", "w_rows"], ["row_maps"], {}),
        ("Reshape", ["row_maps", "rows_shape"], ["row_lines"], {}),
        ("Transpose", ["row_lines"], ["rows"], {"perm": [0, 2, 1]}),
        ("Split", ["rows", "rows_parts"], ["coefficients", "points", "angles"], {"axis": 2}),
    ):
        model.graph.node.append(onnx.helper.make_node(op, sources, results, results[0], **attributes))
    for name, shape in (
        ("coefficients", [1, 64, 4]),
        ("prototypes", [1, 4, 8, 8]),
        ("points", [1, 64, 6]),
        ("angles", [1, 64, 1]),
    ):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    onnx.checker.check_model(model)
    return model


# Changes


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bits, runs of bytes, length."""
    buffer = bytearray(data)
    place = draw.randrange(len(buffer) + 1)
    length = min(draw.choice([1, 1, 2, 4, 8, 64, 1024]), len(buffer) - place)
    how = draw.randrange(7)
    if how == 0 and place < len(buffer):
        buffer[place] ^= 1 << draw.randrange(8)
    elif how == 1:
        buffer[place : place + length] = draw.randbytes(length)
    elif how == 2:
        del buffer[place : place + length]
    elif how == 3:
        buffer[place:place] = buffer[place : place + length] * draw.choice([1, 2, 50])
    elif how == 4:
        buffer[place : place + length] = draw.choice([b"\0", b"\xff", b"\x7f", b"\x80"]) * length
    elif how == 5:
        number = int(draw.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**62])).to_bytes(8, draw.choice(["little", "big"]))
        buffer[place : place + 8] = number
    else:
        del buffer[place:]
    return bytes(buffer[:LARGEST])


def odd_value(draw: random.Random) -> Any:
    how = draw.randrange(8)
    if how < 2:
        return draw.choice(ODD_NUMBERS)
    if how < 4:
        return draw.choice(ODD_TEXTS)
    if how == 4:
        value: Any = draw.choice([None, [], {}, 0])
        for _ in range(draw.choice([1, 3, 40, 300])):
            value = draw.choice([[value], {"a": value}])
        return value
    return draw.choice([None, True, False, [], {}, [0], [None], {"": None}, [[]], [1, 2, 3, 4], {"a": {"b": 1}}])


def _places(value: Any, limit: int = 4000) -> list[tuple[Any, Any]]:
    """Containers and keys of all values in a document, breadth first."""
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(places) < limit:
        holder = waiting.pop(0)
        keys: Sequence[Any] = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys[:200]:
            places.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
    return places


def changed_value(value: Any, draw: random.Random) -> Any:
    """A document with a value, a key or an entry changed."""
    places = _places(value) if isinstance(value, (dict, list)) else []
    if not places:
        return odd_value(draw)
    holder, key = draw.choice(places)
    how = draw.randrange(8)
    if how < 3:
        holder[key] = odd_value(draw)
    elif how == 3:
        del holder[key]
    elif how == 4 and isinstance(holder, dict):
        holder[draw.choice([*ODD_TEXTS[:8], "a", *map(str, list(holder)[:5])])] = holder.pop(key)
    elif how == 5:
        other, place = draw.choice(places)
        with contextlib.suppress(KeyError, IndexError, TypeError):
            other[place] = json.loads(json.dumps(holder[key]))
    elif how == 6 and isinstance(holder, list):
        holder.extend(holder[:20] * draw.choice([1, 1, 50]))
    elif isinstance(holder[key], (int, float)):
        holder[key] = draw.choice([-holder[key], holder[key] * 10**9, str(holder[key]), [holder[key]]])
    else:
        holder[key] = odd_value(draw)
    return value


def changed_json(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.15:
        return changed_bytes(data, draw)
    try:
        value = json.loads(data)
        return json.dumps(changed_value(value, draw)).encode("utf-8", "surrogatepass")[:LARGEST]
    except (ValueError, RecursionError):
        return changed_bytes(data, draw)


def changed_rows(data: bytes, draw: random.Random) -> bytes:
    """Lines of JSON."""
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    lines[place] = changed_json(lines[place], draw)
    return b"\n".join(lines)


# fmt: off
YAML_TOKENS = (
    "&a ", "*a", "<<: *a\n", "!!python/object/apply:os.system [true]", "!!binary x", "!!int ", "? ", "- ", ": ", "| ",
    "{", "}", "[", "]", "%YAML 1.3\n", "---\n", "\t", "!!timestamp 99-99-99", "extends: fuzzed.yaml\n", "~", "0x",
    "1_0", "extends: /dev/zero\n", "extends: yolov8\n", "keypoints: coco\n", "=", "!!set {a}", "0o9", "1:99:99", "é",
    "\ufeff",
)
# fmt: on


def changed_yaml(data: bytes, draw: random.Random) -> bytes:
    how = draw.random()
    if how < 0.1:
        return changed_bytes(data, draw)
    text = data.decode("utf-8", "surrogateescape")
    if how < 0.35:
        place = draw.randrange(len(text) + 1)
        return (text[:place] + draw.choice(YAML_TOKENS) + text[place:]).encode("utf-8", "surrogateescape")
    try:
        value = yaml.safe_load(data)
        return yaml.safe_dump(changed_value(value, draw), allow_unicode=draw.random() < 0.5).encode("utf-8", "replace")
    except Exception:  # it is not YAML any more
        return changed_bytes(data, draw)


def changed_model(data: bytes, draw: random.Random) -> bytes:
    """Structural changes of an ONNX model, or bytes."""
    if draw.random() < 0.15:
        return changed_bytes(data, draw)
    try:
        model = onnx.ModelProto.FromString(data)
        draw.choice(MUTATIONS)(model, draw)
        return model.SerializeToString()
    except Exception:  # the change does not fit what earlier ones left
        return changed_bytes(data, draw)


def changed_archive(data: bytes, draw: random.Random) -> bytes:
    """An entry of a ZIP archive, repacked with valid checksums, or bytes of the archive."""
    if draw.random() < 0.2:
        return changed_bytes(data, draw)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # it is no archive any more
        return changed_bytes(data, draw)
    name = draw.choice(list(entries))
    how = draw.randrange(10)
    if how == 0:
        del entries[name]
    elif how == 1:
        entries[draw.choice(["../outside", "/outside", name + "x", "meta.npy", "a/data.pkl"])] = entries.pop(name)
    elif how == 2:
        entries[name] = entries[draw.choice(list(entries))]
    elif entries[name][:6] == b"\x93NUMPY":
        entries[name] = _changed_array(entries[name], draw)
    else:
        entries[name] = changed_bytes(entries[name], draw)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", draw.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return stream.getvalue()


def _changed_array(data: bytes, draw: random.Random) -> bytes:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception:  # it is no array any more
        return changed_bytes(data, draw)
    how = draw.randrange(6)
    with np.errstate(all="ignore"):
        if array.dtype == np.uint8:  # JSON
            array = np.frombuffer(changed_json(array.tobytes(), draw), np.uint8)
        elif how == 0:
            array = array[: draw.randrange(len(array) + 1)] if array.ndim else array
        elif how == 1:
            array = np.real(array).astype(draw.choice([np.int8, np.float32, np.uint64, np.complex64, "U5", bool]))
        elif how == 2:
            array = array.reshape(-1)
        elif how == 3:
            # Zeros compress a thousandfold.
            array = np.zeros((draw.choice([100, 3000]), 16384), np.int64)
        elif array.size:
            array = array.copy()
            array.reshape(-1)[draw.randrange(array.size)] = draw.choice([0, -1, 2**31 - 1, 127])
            if array.dtype.kind == "f":
                array.reshape(-1)[draw.randrange(array.size)] = draw.choice([np.nan, np.inf, -1e300, 0.0])
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    content = stream.getvalue()
    return content if how < 5 else changed_bytes(content[:128], draw) + content[128:]


def changed_text(data: bytes, draw: random.Random) -> bytes:
    """Lines, and odd ones among them."""
    if draw.random() < 0.3:
        return changed_bytes(data, draw)
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    how = draw.randrange(4)
    if how == 0:
        lines[place] = draw.choice(ODD_TEXTS).encode("utf-8", "replace")
    elif how == 1:
        lines.insert(place, draw.choice(lines))
    elif how == 2:
        lines[place] += draw.choice(ODD_TEXTS).encode("utf-8", "replace")
    else:
        del lines[place]
    return b"\n".join(lines)


# fmt: off
_ATOMS = (
    "output0", "output1", "boxes", "scores", "input_width", "input_height", "1", "-1", "0.5", "1e39", "9" * 400, "1j",
    "points(0.5)", "strides()", "'output0'", "None", "True", "...", "absent", "lambda: 1", "f'{1}'", "[1, 2]",
    "[[1], 2]", "output0[:, :4]", "output0[..., 4:]", "output0[:, [0, 1]]", "output1[::9]", "output0[0]",
    "__import__('os')", "()",
)
_FORMS = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / {1}", "{0} ** {1}", "-{0}", "({0})", "{0}[{1}]", "{0} @ {1}",
    "{0} % {1}", "sigmoid({0})", "exp({0})", "log({0})", "tanh({0})", "sqrt({0})", "abs({0})", "minimum({0}, {1})",
    "maximum({0}, {1})", "softmax({0}, axis=-1)", "sum({0}, axis=1)", "sum({0}, axis=9)", "concat({0}, {1}, axis=-1)",
    "concat({0}, {0}, {0})", "transpose({0}, 0, 2, 1)", "transpose({0}, 0)", "reshape({0}, 1, -1, 4)",
    "reshape({0}, 0, 0, 99999, 99999)", "{0}[:, :, 0:2]", "{0}[..., -1]", "{0}[[{1}]]", "{0}.T", "{0} if {1} else 0",
    "{0} and {1}", "f({0})", "softmax(axis={0})",
)
# fmt: on


def expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(_ATOMS)
    form = draw.choice(_FORMS)
    return form.replace("{0}", expression(draw, depth - 1)).replace("{1}", expression(draw, depth - 1))


def changed_expressions(data: bytes, draw: random.Random) -> bytes:
    """Expressions by name, one a line: ``boxes = ...``."""
    if draw.random() < 0.2:
        return changed_bytes(data, draw)
    lines = data.decode("utf-8", "replace").split("\n")
    place = draw.randrange(len(lines))
    name, _, text = lines[place].partition(" = ")
    how = draw.randrange(5)
    if how == 0:
        text = expression(draw, draw.randrange(1, 6))
    elif how == 1:
        text = draw.choice(_FORMS).replace("{0}", text).replace("{1}", expression(draw, 1))
    elif how == 2:
        text = text * draw.choice([2, 20]) if draw.random() < 0.5 else "(" * 300 + text + ")" * 300
    elif how == 3:
        lines.insert(place, f"{draw.choice(['t', 'boxes', 'output0', 'a b'])} = {expression(draw, 3)}")
    else:
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice([*"()[]{},:.+-*/ =#\\'", "**", "\n", *_ATOMS]) + text[at:]
    lines[min(place, len(lines) - 1)] = f"{name} = {text}"
    return "\n".join(lines[:40]).encode("utf-8", "replace")


@functools.cache
def _setting_names() -> tuple[str, ...]:
    from trtdet.options import offered

    return tuple(row.name for row in offered(BuildOptions)) + tuple(
        row.flag for row in offered(BuildOptions) if row.flag
    )


def changed_words(data: bytes, draw: random.Random) -> bytes:
    """Options and settings, one word a line."""
    words = data.decode("utf-8", "replace").split("\n")
    how = draw.randrange(5)
    value = draw.choice(
        [*ODD_TEXTS, *map(str, ODD_NUMBERS), "1", "8", "true", "int8", "1:4:8", "a,b", "75", "1:2", "=", ","]
    )
    name = draw.choice(_setting_names())
    place = draw.randrange(len(words) + 1)
    if how < 2:
        words[place:place] = [name, value] if name.startswith("--") else ["--set", f"{name}={value}"]
    elif how == 2 and words:
        words[min(place, len(words) - 1)] = value
    elif how == 3 and words:
        del words[min(place, len(words) - 1)]
    else:
        return changed_bytes(data, draw)
    return "\n".join(words[:60]).encode("utf-8", "replace")


# Readers


def read_model(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "m.onnx"
    path.write_bytes(data)
    (folder.parent / "outside.bin").write_bytes(bytes(4096))
    config = load_config(str(material / ("odd.yaml" if choice(data, 2) else "tiny.yaml")))
    how = choice(data, 100)
    if how < 88:
        loaded = load_model(path)
        embedded_nms(loaded, config)
        forms = ("keep", "swish", "plugin")
        rewrite(loaded, Options(config, nms="native", batch=1 + choice(data, 2), silu=forms[how % 3]))  # type: ignore[arg-type]
        return
    words: list[object] = [path, "--config", material / ("odd.yaml" if choice(data, 2) else "tiny.yaml")]
    images = ["--images", material / "two"]
    if how < 94:
        command("build", *words, *images, "--backend", "onnxruntime", "--dry-run", "-o", folder / "b")
    elif how == 94:
        command("init", path, "-o", folder / "m.yaml")
    elif how == 95:
        command("predict", *words, material / "two", "-o", folder / "p")
    elif how == 96:
        command("calibrate", *words, *images, "-o", folder / "ranges.json")
    elif how == 97:
        command("export", path, "--config", material / "tiny.yaml", "-o", folder / "exported.onnx")
    elif how == 98:
        command("profile", *words, "--runs", 2, "--warm-up", 1)
    else:
        command(
            "build", *words, *images, "--backend", "onnxruntime", "--int8-all", "--effort", "none", "-o", folder / "b"
        )


def read_configuration(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "fuzzed.yaml"
    path.write_bytes(data)
    config = load_config(str(path))
    if config.input.height * config.input.width <= 1 << 20 and choice(data, 40) == 0:
        command("predict", material / "tiny.onnx", "--config", path, material / "two", "-o", folder / "p")


def _bundle(folder: Path, material: Path, which: str) -> Path:
    """A copy whose files are links, so that it takes no time."""
    place = folder / "bundle"
    place.mkdir()
    for file in (material / which).iterdir():
        os.link(file, place / file.name)
    return place


def _put(place: Path, name: str, data: bytes) -> None:
    """Replaces a file that may be a link."""
    (place / name).unlink(missing_ok=True)
    (place / name).write_bytes(data)


def _list(place: Path, name: str, data: bytes) -> None:
    """Replaces a file of a bundle, with the hash that its manifest then needs."""
    manifest = json.loads((place / "manifest.json").read_bytes())
    manifest["files"][name] = hashlib.sha256(data).hexdigest()
    _put(place, name, data)
    _put(place, "manifest.json", json.dumps(manifest).encode())


def read_manifest(data: bytes, folder: Path, material: Path) -> None:
    which = ("bundle", "engine")[b"tensorrt-rtx" in data]
    place = _bundle(folder, material, which)
    _put(place, "manifest.json", data)
    how = choice(data, 60)
    bundle = trtdet.Bundle(place)
    repr(bundle)
    str(bundle.config)
    if how < 2:
        command("verify", place)
    elif how < 10:
        command("compare", material / which, place)
    elif how < 11:
        command("report", place, "-o", folder / "r.html")
    elif how < 12:
        command("package", place, "--format", ("triton", "deepstream")[how % 2], "-o", folder / "package")
    elif how < 15:
        command("audit", place)
    elif how < 16:
        command("predict", place, material / "two", "-o", folder / "p")
    elif how < 18:
        options = ["--config", material / "tiny.yaml", "--fp32", "--backend", "onnxruntime"]
        command("build", material / "tiny.onnx", *options, "-o", place)


def read_member(name: str) -> Callable[[bytes, Path, Path], None]:
    """A reader of a file of a bundle; its hash in the manifest is right."""

    def read(data: bytes, folder: Path, material: Path) -> None:
        place = _bundle(folder, material, "engine")
        _list(place, name, data)
        how = choice(data, 6)
        if how < 2:
            command("audit", place)
        elif how < 3:
            command("audit", place, "--gpu", "L4")
        elif how < 5:
            command("compare", material / "engine", place)
        else:
            command("report", place, "-o", folder / "r.html")

    return read


def read_network(data: bytes, folder: Path, material: Path) -> None:
    """The network of a bundle, which a report draws and an estimate counts."""
    place = _bundle(folder, material, ("bundle", "engine")[choice(data, 2)])
    _list(place, "int8.onnx", data)
    how = choice(data, 8)
    if how < 4:
        command("audit", place, "--gpu", "L4")
    elif how < 5:
        command("package", place, "--format", "triton", "-o", folder / "package")
    elif how < 6:
        command("predict", place, material / "two", "-o", folder / "p")
    else:
        command("report", place, "-o", folder / "r.html")


def read_ranges(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "ranges.json"
    path.write_bytes(data)
    ranges = Ranges.load(path)
    ranges.to_calibration_cache(8600)


def read_plan(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "plan.json"
    path.write_bytes(data)
    PrecisionPlan.load(path)
    how = choice(data, 24)
    if how < 5:
        command("compare", material / "bundle" / "plan.json", path)
    elif how < 6:
        command("report", path, "-o", folder / "r.md")
    elif how == 7:
        words = ["--config", material / "tiny.yaml", "--images", material / "two", "--backend", "onnxruntime"]
        command("build", material / "tiny.onnx", *words, "--dry-run", "--keep-fp16", path, "-o", folder / "b")


def read_result(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "result.json"
    path.write_bytes(data)
    suffix = (".html", ".md", ".json")[choice(data, 3)]
    bundle = [material / "bundle"] if choice(data, 20) == 0 else []
    command("report", path, *bundle, "-o", folder / f"r{suffix}")


def read_experiment(data: bytes, folder: Path, material: Path) -> None:
    place = _bundle(folder, material, "sweep")
    _put(place, "experiment.json" if data[:1] == b"{" and b'"schema"' not in data[:20] else "provenance.json", data)
    if choice(data, 2):
        command("compare", material / "sweep", place)
    else:
        command("report", place, "-o", folder / "r.html")


def read_journal(data: bytes, folder: Path, material: Path) -> None:
    place = folder / "sweep"
    shutil.copytree(material / "sweep", place)
    (place / "rows.jsonl").write_bytes(data)
    words = ["--config", material / "tiny.yaml", "--images", material / "two", "--backend", "onnxruntime", "--dry-run"]
    annotated = ["--val-images", material / "images", "--annotations", material / "annotations.json"]
    command("sweep", material / "tiny.onnx", *words, *annotated, "--calib", "minmax", "-o", place)


def annotations(material: Path) -> list[bytes]:
    """With polygons and both forms of run lengths; polygons alone; boxes alone."""
    document = json.loads((material / "annotations.json").read_bytes())
    contents = [json.dumps(document).encode()]
    for mask in ([[2, 2, 10, 2, 10, 10]], None):
        for annotation in document["annotations"]:
            annotation["segmentation"] = mask
        contents.append(json.dumps(document).encode())
    return contents


def changed_annotations(data: bytes, draw: random.Random) -> bytes:
    """Mostly sizes, run lengths and corners, which libraries in C read."""
    if draw.random() < 0.5:
        return changed_json(data, draw)
    try:
        document = json.loads(data)
        annotation = draw.choice(document["annotations"])
        mask = annotation["segmentation"]
        how = draw.randrange(5)
        if how == 0:
            draw.choice(document["images"])[draw.choice(["width", "height"])] = draw.choice(
                [0, -1, 2**16, 2**31, 10**9]
            )
        elif how == 1:
            annotation["bbox"] = draw.choice([[0, 0, -5, -5], [1e308] * 4, [-1e308, 0, 1e308, 1], [0, 0, 0, 0]])
        elif isinstance(mask, dict):
            sizes = [[10**9, 10**9], [-1, -1], [0, 0], [16], [2**31, 2], [16, 17], [46341, 46341]]
            mask["size"] = draw.choice([[16, 16], *sizes]) if how == 2 else mask["size"]
            text = "".join(chr(draw.randrange(40, 120)) for _ in range(draw.randrange(40)))
            mask["counts"] = draw.choice([text, [10**9] * 5, [-5, 300], [], [2**32 + 256], "o" * 5000, [1.5], [256]])
        else:
            far = [[1e9, 1e9, -1e9, 1e9, 5, 5], [1e30] * 6, [1e7, 0, 0, 1e7, 1e7, 1e7]]
            annotation["segmentation"] = draw.choice([*far, [1, 2], [], [1, 2, 3], ["a"] * 8, [0] * 6]), *(mask or [])
        return json.dumps(document).encode()
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):  # it is no such document any more
        return changed_json(data, draw)


def read_annotations(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "annotations.json"
    path.write_bytes(data)
    dataset = trtdet.CocoDataset.load(path, material / "images", ["c0", "c1", "c2"])
    how = choice(data, 25)
    if how == 0:
        command("eval", material / "bundle", "--images", material / "images", "--annotations", path)
    elif how < 8:
        mask = np.zeros((16, 16), bool)
        mask[5:11, 5:11] = True
        found = FoundParts(masks=[run_lengths(mask)], keypoints=np.ones((1, 2, 3), np.float32))
        metric = CocoMetric(dataset, sigmas=(0.1, 0.1))
        for image in dataset.images:
            metric.update(image.id, [[5, 5, 11, 11]], [0.9], classes=[0], parts=found)
        metric.compute_masks()
        metric.compute_keypoints()
        for of in ("masks", "keypoints"):
            if getattr(dataset, f"has_{of}"):
                metric.class_matches(of)  # type: ignore[arg-type]


def changed_task(data: bytes, draw: random.Random) -> bytes:
    """Mostly corners, keypoints and areas."""
    if draw.random() < 0.4:
        return changed_annotations(data, draw)
    try:
        document = json.loads(data)
        annotation = draw.choice(document["annotations"])
        how = draw.randrange(4)
        if how == 0:
            (polygon,) = annotation["segmentation"]
            polygon[draw.randrange(len(polygon))] = draw.choice([*ODD_NUMBERS, 1e9, "3", None])
        elif how == 1:
            corner = draw.choice([[0, 0], [5, 5], [1e9, -1e9], [3]])
            annotation["segmentation"] = [corner * draw.choice([4, 4, 4, 3, 5, 0])] * draw.choice([1, 1, 2])
        elif how == 2:
            points = annotation["keypoints"]
            points[draw.randrange(len(points))] = draw.choice([*ODD_NUMBERS, 3, 1.5, "2", None])
        else:
            annotation[draw.choice(["area", "num_keypoints", "iscrowd", "keypoints"])] = draw.choice(
                [0, -1, 1e308, 2, None, [], [0] * 6, [1] * 5, [[1, 2, 2]]]
            )
        return json.dumps(document).encode()
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):  # it is no such document any more
        return changed_json(data, draw)


def read_task(data: bytes, folder: Path, material: Path) -> None:
    """Annotations of all parts, scored for one of them."""
    path = folder / "annotations.json"
    path.write_bytes(data)
    task = list(TASKS)[choice(data, len(TASKS))]
    words = ["--images", material / "images", "--annotations", path]
    if choice(data, 20):
        command("eval", material / "parts.onnx", "--config", material / f"{task}.yaml", *words)
    else:
        command("eval", material / task, "--against", material / "parts.onnx", *words)


def read_task_configuration(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "fuzzed.yaml"
    path.write_bytes(data)
    config = load_config(str(path))
    if config.input.height * config.input.width > 1 << 20:
        return
    model, how = material / "parts.onnx", choice(data, 10)
    if how < 6:
        command("predict", model, "--config", path, material / "two", "-o", folder / "p")
    elif how < 9:
        annotated = ["--images", material / "images", "--annotations", material / "annotations.json"]
        command("eval", model, "--config", path, *annotated)
    else:
        words = ["--images", material / "two", "--backend", "onnxruntime", "--int8-all", "--effort", "none"]
        command("build", model, "--config", path, *words, "-o", folder / "b")


def read_prepared(data: bytes, folder: Path, material: Path) -> None:
    place = _bundle(folder, material, "prepared")
    _put(place, "prepared.json", data)
    prepared = PreparedFolder(place)
    str(prepared.table())
    for candidate in prepared.content.candidates[:4]:
        prepared.manifest(candidate)
        prepared.model(candidate)
    if choice(data, 10) == 0:
        command("finish", place, "-o", folder / "b")


def read_histograms(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "histograms.npz"
    path.write_bytes(data)
    collection = Collection.load(path)
    rules = ("minmax", "entropy", "percentile", "mse")
    Ranges.choose(collection, rules[choice(data, 4)]).to_calibration_cache(8600)


def read_list(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "list.txt"
    path.write_bytes(data)
    find_images(path, material / "images")


def read_picture(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "image.png"
    path.write_bytes(data)
    preprocess(read_image(path), load_config(str(material / "tiny.yaml")).input)


def read_cache(data: bytes, folder: Path, material: Path) -> None:
    path = folder / "calibration.cache"
    path.write_bytes(data)
    how = choice(data, 100)
    if how < 99:
        cache.read(path.read_text("utf-8", errors="replace"), str(path), version=8600, skip_unusable=bool(how))
        return
    words = ["--config", material / "tiny.yaml", "--quantization", "implicit", "--set", f"calibration.cache={path}"]
    command("build", material / "tiny.onnx", *words, "--backend", "tensorrt", "--dry-run", "-o", folder / "b")


def read_checkpoint(data: bytes, folder: Path, material: Path) -> None:
    from trtdet.exporter import checkpoints

    path = folder / "weights.pt"
    path.write_bytes(data)
    how = choice(data, 10)
    if how < 4:
        checkpoints.read_state(path)
    elif how < 7:
        checkpoints.network_of(path, checkpoints.read(path, ("models", "utils", "ultralytics"), "--weights"), "none")
    elif how < 9:
        command("export", f"yolov5:{path}", "--size", "64x64", "-o", folder / "m.onnx")
    else:
        command("export", f"ultralytics:{path}", "--size", "64x64", "-o", folder / "m.onnx")


def validated(document: dict[str, Any]) -> Config:
    """A configuration of a document, without YAML, which takes most of the time."""
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError(str(error.errors(include_url=False)[0]["msg"])[:1000]) from None


def read_expressions(data: bytes, folder: Path, material: Path) -> None:
    lines = [line.partition(" = ") for line in data.decode("utf-8", "replace").split("\n")]
    document = yaml.safe_load(CONFIG)
    document["head"] = {"decode": "boxes", "compute": {name: text for name, _, text in lines}}
    path = folder / "fuzzed.yaml"
    if choice(data, 8) == 0:
        path.write_text(json.dumps(document))
        config = load_config(str(path))
    else:
        config = validated(document)
    rng = np.random.default_rng(0)
    outputs = {"one": rng.normal(size=(1, 64, 7)), "two": rng.normal(size=(1, 64, 4))}
    expressions.computed({name: value.astype(np.float32) for name, value in outputs.items()}, config)
    expressions.shapes({name: (None, *value.shape[1:]) for name, value in outputs.items()}, config)


def read_words(data: bytes, folder: Path, material: Path) -> None:
    words = data.decode("utf-8", "replace").replace("\0", "").split("\n")
    for place, word in enumerate(words):
        if "=" in word:
            with contextlib.suppress(ValueError):  # argparse prints it
                setting(BuildOptions, word)
        # No option of a fuzzed command may name a place elsewhere or take hours.
        if word in ("--json", "--help", "-h", "--help-settings", "-o", "--output", "--ray", "--backend"):
            words[place] = "--verbose"
    fixed = ["--config", material / "tiny.yaml", "--backend", "onnxruntime", "-o", folder / "b", "--dry-run"]
    command("build", material / "tiny.onnx", *words, *fixed)


def read_signature(data: bytes, folder: Path, material: Path) -> None:
    place = _bundle(folder, material, "signed")
    key = material / "key-public.pem"
    if len(data) < 100 and b"-----" not in data:
        _put(place, "manifest.sig", data)
    else:
        key = folder / "key.pem"
        key.write_bytes(data)
    if choice(data, 3) == 0 and key.parent == folder:
        command("sign", place, "--key", key)
    else:
        command("verify", place, "--key", key)


# Sound inputs


def files(*names: str) -> Callable[[Path], list[bytes]]:
    """Seeds from files of the material that are there; at least one."""

    def seeds(material: Path) -> list[bytes]:
        contents = [path.read_bytes() for name in names for path in sorted(material.glob(name))]
        if not contents:
            raise SystemExit(f"the material has none of {', '.join(names)}")
        return contents

    return seeds


def models(material: Path) -> list[bytes]:
    small = [network().SerializeToString() for network in NETWORKS.values()]
    return [detector().SerializeToString()] * 8 + [tiny_detector().SerializeToString()] * 4 + small


def configurations(material: Path) -> list[bytes]:
    shipped = sorted((ROOT / "configs").glob("*.yaml"))
    return [CONFIG.encode(), ODD_CONFIG.encode(), *(path.read_bytes() for path in shipped)]


def task_annotations(material: Path) -> list[bytes]:
    """Every annotation has a polygon of four corners and keypoints."""
    document = json.loads((material / "annotations.json").read_bytes())
    for number, annotation in enumerate(document["annotations"]):
        annotation["segmentation"] = [[2, 2, 10, 3, 9, 10 + number, 1, 9]]
        annotation["num_keypoints"] = 2
    return [json.dumps(document).encode()]


def pictures(material: Path) -> list[bytes]:
    rng = np.random.default_rng(2)
    picture = Image.fromarray(rng.integers(0, 256, (40, 30, 3), dtype=np.uint8))
    grey = Image.fromarray(rng.integers(0, 65536, (20, 20)).astype(np.uint16))
    contents = []
    for mode, kinds in (
        ("RGB", ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")),
        ("P", ("PNG", "GIF")),
        ("RGBA", ("PNG", "WEBP", "TIFF")),
        ("L", ("JPEG", "PNG", "TIFF")),
        ("CMYK", ("JPEG", "TIFF")),
        ("1", ("PNG", "TIFF", "BMP")),
    ):
        for kind in kinds:
            stream = io.BytesIO()
            picture.convert(mode).save(stream, kind)
            contents.append(stream.getvalue())
    stream = io.BytesIO()
    grey.save(stream, "PNG")
    return [*contents, stream.getvalue()]


def checkpoint_files(material: Path) -> list[bytes]:
    import torch

    state = {"model": {"a.weight": torch.zeros(2, 3), "a.bias": torch.ones(2)}, "epoch": 3, "best": 0.5}
    old, new = io.BytesIO(), io.BytesIO()
    torch.save(state, old, _use_new_zipfile_serialization=False)
    torch.save(state, new)
    return [old.getvalue(), new.getvalue(), (ROOT / "tests" / "fixtures" / "yolov5_tiny.pt").read_bytes()]


def expression_texts(material: Path) -> list[bytes]:
    return [
        b"boxes = output1\nscores = sigmoid(output0[..., 4:])",
        b"t = exp(output1) * strides() + points(0.5)[..., [0, 1, 0, 1]]\nboxes = concat(t, output1)\nscores = t",
        b"boxes = output0[:, :, :4] * [1, 2, 3, 4]\nscores = softmax(output0, axis=-1)[..., :3] ** 0.5",
        b"boxes = transpose(reshape(output1, 1, 4, -1), 0, 2, 1)\nscores = maximum(sum(output0), 0)",
    ]


def option_words(material: Path) -> list[bytes]:
    images = str(material / "two")
    return [
        f"--images\n{images}".encode(),
        f"--images\n{images}\n--int8-all\n--set\nnms.max_detections=100\nengine.workspace=1".encode(),
        b"--fp16",
        f"--images\n{images}\n--calib\nmse\n--effort\nbias,smooth\n--batch\n1:2:4".encode(),
    ]


KINDS = (
    Kind("yaml", configurations, changed_yaml, read_configuration, 12_000),
    Kind("manifest", files("bundle/manifest.json", "engine/manifest.json"), changed_json, read_manifest, 4_000),
    Kind("ranges", files("bundle/ranges.json"), changed_json, read_ranges, 9_000),
    Kind("plan", files("bundle/plan.json"), changed_json, read_plan, 6_000),
    Kind("plan.json", files("engine/plan.json"), changed_json, read_member("plan.json"), 200),
    Kind("ranges.json", files("engine/ranges.json"), changed_json, read_member("ranges.json"), 200),
    Kind("audit.json", files("engine/audit.json"), changed_json, read_member("audit.json"), 200),
    Kind("worth.json", files("engine/worth.json"), changed_json, read_member("worth.json"), 200),
    Kind("int8.onnx", files("bundle/int8.onnx", "engine/int8.onnx"), changed_model, read_network, 200),
    Kind("results", files("*.json"), changed_json, read_result, 2_500),
    Kind("experiment", files("sweep/experiment.json", "sweep/provenance.json"), changed_json, read_experiment, 300),
    Kind("journal", files("sweep/rows.jsonl"), changed_rows, read_journal, 100),
    Kind("annotations", annotations, changed_annotations, read_annotations, 10_000),
    Kind("task annotations", task_annotations, changed_task, read_task, 1_000),
    Kind("task yaml", files(*(f"{task}.yaml" for task in TASKS)), changed_yaml, read_task_configuration, 1_000),
    Kind("candidates", files("prepared/prepared.json"), changed_json, read_prepared, 1_500),
    Kind("npz", files("bundle/histograms.npz"), changed_archive, read_histograms, 500),
    Kind("lists", lambda _: [b"00.png\n01.png\n# note\n02.png\n"], changed_text, read_list, 8_000),
    Kind("images", pictures, changed_bytes, read_picture, 12_000),
    Kind("cache", files("bundle/calibration.cache"), changed_text, read_cache, 8_300),
    Kind("checkpoints", checkpoint_files, changed_archive, read_checkpoint, 3_000),
    Kind("compute", expression_texts, changed_expressions, read_expressions, 10_000),
    Kind("options", option_words, changed_words, read_words, 800),
    Kind("keys", files("signed/manifest.sig", "key.pem", "key-public.pem"), changed_bytes, read_signature, 1_000),
    Kind("onnx", models, changed_model, read_model, 10_000),
)
"""All kinds; their counts are 102,000."""

EXPECTED = (TrtdetError, Refused)
__all__ = ["CLASSES", "EXPECTED", "KINDS", "ConfigError", "Kind", "Refused", "made_material"]


def made_material(folder: Path) -> None:
    """Writes what the kinds need into a folder that does not exist: a tiny detector and results of its commands."""
    folder.mkdir(parents=True)
    onnx.save(tiny_detector(), folder / "tiny.onnx")
    (folder / "tiny.yaml").write_text(CONFIG)
    (folder / "odd.yaml").write_text(ODD_CONFIG)
    rng = np.random.default_rng(1)
    entries, boxes = [], []
    for place, count in (("images", 6), ("two", 2), ("scored", 4)):
        (folder / place).mkdir()
        for number in range(count):
            pixels = rng.integers(0, 40 * (number + 1), (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / place / f"{number:02}.png")
            if place == "images":
                entries.append({"id": number + 1, "file_name": f"{number:02}.png", "width": 16, "height": 16})
                mask = [[2, 2, 10, 2, 10, 10, 2, 10]] if number % 2 else {"size": [16, 16], "counts": [34, 8, 214]}
                box = {"id": number + 1, "image_id": number + 1, "category_id": 1, "bbox": [2, 2, 8, 8]}
                boxes.append({**box, "area": 64, "iscrowd": 0, "segmentation": mask, "keypoints": [3, 3, 2, 4, 4, 1]})
    categories = [{"id": index + 1, "name": f"c{index}"} for index in range(CLASSES)]
    document = {"images": entries, "annotations": boxes, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(document))
    model = [folder / "tiny.onnx", "--config", folder / "tiny.yaml"]
    images = ["--images", folder / "images"]
    annotated = ["--images", folder / "images", "--annotations", folder / "annotations.json"]
    onnxruntime = ["--backend", "onnxruntime"]
    command("build", *model, *images, *onnxruntime, "--int8-all", "-o", folder / "bundle")
    command("build", *model, *images, "--backend", "tensorrt-rtx", "--int8-all", "-o", folder / "engine")
    command("sensitivity", *model, *images, "--int8-all", "-o", folder / "sensitivity.json")
    scored = ["--val-images", folder / "images", "--annotations", folder / "annotations.json"]
    command("sweep", *model, *images, *scored, *onnxruntime, "--calib", "minmax", "mse", "-o", folder / "sweep")
    quick = ["--seconds", 0.1, "--warm-up", 0.1, "--min-runs", 5]
    command("bench", folder / "bundle", folder / "tiny.onnx", *model[1:], *quick, "-o", folder / "bench.json")
    command("profile", folder / "bundle", "--runs", 5, "-o", folder / "profile.json")
    command("eval", folder / "bundle", *annotated, "--against", folder / "tiny.onnx", "-o", folder / "eval.json")
    onnx.save(parts_detector(), folder / "parts.onnx")
    for task, head in TASKS.items():
        config = yaml.safe_load(CONFIG)
        config["head"] |= head
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(config))
        parts = [folder / "parts.onnx", "--config", folder / f"{task}.yaml"]
        command("build", *parts, *images, *onnxruntime, "--int8-all", "-o", folder / task)
        (folder / "corners.json").write_bytes(task_annotations(folder)[0])
        scored = ["--images", folder / "images", "--annotations", folder / "corners.json"]
        command("eval", folder / task, *scored, "--against", folder / "parts.onnx", "-o", folder / f"eval-{task}.json")
    shutil.copy(folder / "bundle" / "plan.json", folder / "plan.json")
    prepare = ["--val-images", folder / "scored", "--for", "tensorrt-10.3", "-o", folder / "prepared"]
    command("prepare", *model, *images, *prepare)
    shutil.copytree(folder / "bundle", folder / "signed")
    pair(folder, "key")
    command("sign", folder / "signed", "--key", folder / "key.pem")
