"""Writes what the fuzz targets start from: ``seeds.py DIR`` makes one folder for each target.

python service/fuzz/seeds.py build/fuzz/seeds
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from trtdet import build, load_config
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions, NmsOptions

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from record import fingerprints


def manifests() -> dict[str, bytes]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for nms in ("host", "native"):
            bundle = Path(folder) / nms
            options = BuildOptions(precision="fp32", backend="onnxruntime", nms=NmsOptions(mode=nms))
            build(SHAPES_MODEL, load_config("shapes"), bundle, options)
            manifest = json.loads((bundle / "manifest.json").read_text())
            name, digest = next(iter(manifest["files"].items()))
            manifest["backend"]["plugins"] = [{"file": name, "sha256": digest}]
            found[nms] = json.dumps(manifest).encode()
    masks = {"output": "masks", "size": 28, "threshold": 0.5}
    output = {"name": "masks", "dtype": "float32", "shape": [1, 100, 28, 28]}
    found["masks"] = json.dumps(manifest | {"masks": masks, "outputs": [*manifest["outputs"], output]}).encode()
    shapes = {
        "mask_coefficients": [1, 100, 32],
        "prototypes": [1, 32, 64, 64],
        "keypoints": [1, 100, 2, 3],
        "rotated_boxes": [1, 100, 5],
    }
    manifest["outputs"] += [{"name": name, "dtype": "float32", "shape": shape} for name, shape in shapes.items()]
    manifest["schema"] = 2
    manifest["parts"] = {
        "masks": {"coefficients": "mask_coefficients", "prototypes": "prototypes", "threshold": 0.5},
        "keypoints": {"output": "keypoints", "names": ["a", "b"], "sigmas": [0.5, 0.5], "skeleton": [[0, 1]]},
        "rotated_boxes": {"output": "rotated_boxes"},
    }
    found["parts"] = json.dumps(manifest).encode()
    return found


def images() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    found = {}
    exif = Image.Exif()
    exif[0x0112] = 6
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"):
        noise = rng.integers(0, 256, (7, 9, 4), np.uint8)
        wide = Image.fromarray(noise.view(np.uint16)[..., 0])
        picture = wide if mode == "I;16" else Image.fromarray(noise, "RGBA").convert("RGB").convert(mode)
        for kind, extra in (
            ("PNG", {}),
            ("JPEG", {}),
            ("JPEG", {"progressive": True}),
            ("WEBP", {}),
            ("WEBP", {"lossless": True}),
        ):
            stream = io.BytesIO()
            try:
                picture.save(stream, kind, exif=exif, **extra)
            except OSError:
                continue  # the kind has no such mode
            name = "-".join((mode.replace(";", ""), kind, *extra))
            found[name] = bytes([len(found)]) + stream.getvalue()
    return found


def recordings() -> dict[str, bytes]:
    """Of the network of ``bundles.hpp``."""
    prints = fingerprints(np.full((1, 3, 8, 16), 10, np.float32))
    parts = {"fingerprints": prints, "outputs.boxes": np.zeros((1, 3, 4)), "outputs.scores": np.zeros((1, 3, 2))}
    header, data = {"__metadata__": {"format": "trtdet-recording-1", "content_hash": "abc"}}, b""
    for name, value in parts.items():
        raw = value.astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return {"one": struct.pack("<Q", len(text)) + text + data}


def multiparts() -> dict[str, bytes]:
    head = b'Content-Disposition: form-data; name="image"; filename="a.jpg"\r\nContent-Type: image/jpeg'
    part = b"--x\r\n" + head + b"\r\n\r\ndata\r\n"
    first = b'multipart/form-data; boundary="x"\n'
    return {"one": first + part + b"--x--\r\n", "two": first + part + part + b"--x--\r\n", "cut": first + part}


def inferences() -> dict[str, bytes]:
    """Of a network that takes float32 (B, 3, 1, 2)."""
    tensor = {"name": "images", "shape": [1, 3, 1, 2], "datatype": "FP32"}
    outputs = [{"name": "scores", "parameters": {"binary_data": True}}, {"name": "boxes"}]
    bodies = {
        "flat": ({"inputs": [{**tensor, "data": [0, 1, 2.5, -3e2, 4, 5]}]}, b""),
        "nested": (
            {"id": "7", "inputs": [{**tensor, "data": [[[[0, 1]], [[2, 3]], [[4, 5]]]]}], "outputs": outputs},
            b"",
        ),
        "binary": (
            {
                "inputs": [{**tensor, "shape": [2, 3, 1, 2], "parameters": {"binary_data_size": 48}}],
                "outputs": outputs,
                "parameters": {"binary_data_output": True},
            },
            bytes(range(48)),
        ),
    }
    found = {}
    for name, (header, data) in bodies.items():
        text = json.dumps(header).encode()
        found[name] = (str(len(text)).encode() if data else b"") + b"\n" + text + data
    return found


def heads() -> dict[str, bytes]:
    infer = (
        b"POST /v2/models/a%20b/versions/1/infer?x=%41&y=+ HTTP/1.1\r\nHost: x\r\nX-Request-Id: a-1\r\n"
        b"Inference-Header-Content-Length: 12\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n"
        b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n\r\n"
    )
    chunked = (
        b"POST http://x/v1/detect?a=1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    )
    return {"infer": infer, "chunked": chunked, "old": b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"}


def packed_bodies() -> dict[str, bytes]:
    body = bytes(range(256)) * 4 + bytes(2000)
    bare = zlib.compressobj(wbits=-15)
    return {
        "gzip": b"\0" + gzip.compress(body, mtime=0),
        "deflate": b"\2" + zlib.compress(body),
        "bare": b"\2" + bare.compress(body) + bare.flush(),
    }


def messages() -> dict[str, bytes]:
    """ModelInferRequests for the same network as :func:`inferences`, in protobuf's encoding."""

    def number(value: int) -> bytes:
        data = b""
        while value > 127:
            data, value = data + bytes([value & 127 | 128]), value >> 7
        return data + bytes([value])

    def field(which: int, data: bytes) -> bytes:
        return number(which << 3 | 2) + number(len(data)) + data

    def tensor(kind: bytes, shape: list[int], rest: bytes = b"") -> bytes:
        return field(5, field(1, b"images") + field(2, kind) + field(3, b"".join(map(number, shape))) + rest)

    values, files = struct.pack("<6f", *range(6)), [b"one", b"other"]
    names = field(1, b"model") + field(2, b"1") + field(3, b"7")
    outputs = field(6, field(1, b"scores")) + field(6, field(1, b"boxes"))
    parameter = field(4, field(1, b"priority") + field(2, b"\x10\x05"))
    return {
        "raw": names + parameter + tensor(b"FP32", [1, 3, 1, 2], parameter) + outputs + field(7, values),
        "contents": names + tensor(b"FP32", [1, 3, 1, 2], field(5, field(6, values))),
        "files": tensor(b"BYTES", [2], field(5, b"".join(field(8, file) for file in files))),
        "rawfiles": tensor(b"BYTES", [2]) + field(7, b"".join(struct.pack("<I", len(file)) + file for file in files)),
    }


def main(folder: Path) -> None:
    kinds = {
        "manifest": manifests,
        "image": images,
        "recording": recordings,
        "multipart": multiparts,
        "inference": inferences,
        "head": heads,
        "encoding": packed_bodies,
        "grpc": messages,
    }
    for name, make in kinds.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for seed, data in make().items():
            (folder / name / seed).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
