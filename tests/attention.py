"""A detector with attention that is small enough to be built in tests: convolutions, then a transformer over places."""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

from trtdet.config import Config, load_config

SIDE = 8
"""Places along a side of the feature map that the transformer reads."""

WIDTH = 32
HEADS = 2

PRODUCTS = 11
"""Products with weights: four around attention, two each in two feed-forward parts, three in the heads."""

CONFIG = """extends: shapes
name: attention
input: {size: [128, 128]}
head: {decode: boxes, boxes: cxcywh, units: relative, scores: logits}
"""


def attention_config(folder: Path) -> Config:
    """The configuration of :func:`attention_detector`, written into a folder as ``attention.yaml``."""
    path = folder / "attention.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return load_config(str(path))


class _Net:
    """Writes nodes that are named after what they make."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(2)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def const(self, name: str, value: ArrayLike, dtype: type = np.float32) -> str:
        self.weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def add(self, kind: str, name: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        made = [f"{name}_output_{index}" for index in range(outputs)] if outputs > 1 else [f"{name}_output"]
        self.nodes.append(helper.make_node(kind, list(inputs), made, name, **attributes))
        return made[0]

    def conv(self, name: str, x: str, into: int, out: int, size: int, scale: float = 1.0, **attributes: object) -> str:
        into //= int(str(attributes.get("group", 1)))
        weight = self.rng.normal(0, scale / np.sqrt(into * size * size), (out, into, size, size))
        bias = self.rng.normal(0, 0.1, out)
        inputs = self.const(f"{name}.weight", weight), self.const(f"{name}.bias", bias)
        return self.add("Conv", name, x, *inputs, **attributes)

    def linear(self, name: str, x: str, into: int, out: int, scale: float = 1.0, bias: ArrayLike = 0.0) -> str:
        weight = self.const(f"{name}.weight", self.rng.normal(0, scale / np.sqrt(into), (into, out)))
        product = self.add("MatMul", f"{name}/MatMul", x, weight)
        return self.add("Add", f"{name}/Add", self.const(f"{name}.bias", self.rng.normal(0, 0.1, out) + bias), product)

    def gemm(self, name: str, x: str, into: int, out: int, turned: bool) -> str:
        weight = self.rng.normal(0, 1 / np.sqrt(into), (out, into) if turned else (into, out))
        inputs = self.const(f"{name}.weight", weight), self.const(f"{name}.bias", self.rng.normal(0, 0.1, out))
        return self.add("Gemm", f"{name}/Gemm", x, *inputs, transB=int(turned))

    def norm(self, name: str, x: str, scale: ArrayLike = 1.0) -> str:
        wide = self.const(f"{name}.weight", np.broadcast_to(scale, WIDTH))
        return self.add("LayerNormalization", name, x, wide, self.const(f"{name}.bias", np.zeros(WIDTH)), axis=-1)

    def shaped(self, name: str, x: str, *sizes: int) -> str:
        return self.add("Reshape", f"{name}/Reshape", x, self.const(f"{name}.shape", sizes, np.int64))

    def turned(self, name: str, x: str, *order: int) -> str:
        return self.add("Transpose", f"{name}/Transpose", x, perm=list(order))

    def attend(self, name: str, query: str, key: str, value: str) -> str:
        """softmax(query key) value, of (B, heads, L, d), (B, heads, d, L) and (B, heads, L, d)."""
        scores = self.add("MatMul", f"{name}/scores/MatMul", query, key)
        scaled = self.add("Mul", f"{name}/Mul", scores, self.const(f"{name}.scale", (WIDTH / HEADS) ** -0.5))
        return self.add(
            "MatMul", f"{name}/values/MatMul", self.add("Softmax", f"{name}/Softmax", scaled, axis=-1), value
        )


def attention_detector(batch: int | str = 1, outlier: float = 20.0) -> onnx.ModelProto:
    """A detector for :func:`attention_config` that has learnt nothing.

    Two convolutions; attention as in YOLO11, over feature maps, whose queries, keys and values are one convolution; an
    encoder layer as in vision transformers, whose LayerNormalization comes first, with GELU written out; a layer of two
    Gemm with ReLU in between; heads of one product for the classes and two for the boxes.

    Args:
        batch: how many images it takes; a name leaves that open.
        outlier: how many times the others two channels of the normalised are, as in trained transformers.

    Returns:
        A model of opset 17 from ``images`` float32 (batch, 3, 128, 128) to ``boxes`` float32 (batch, 64, 4) and
        ``scores`` float32 (batch, 64, 10).
    """
    net = _Net()
    x = net.add("Relu", "/stem/Relu", net.conv("/stem/Conv", "images", 3, WIDTH, 4, 0.02, strides=[4, 4]))
    x = net.add("Relu", "/down/Relu", net.conv("/down/Conv", x, WIDTH, WIDTH, 4, 2.0, strides=[4, 4]))
    x = _area_attention(net, x)
    tokens = net.turned("/tokens", net.shaped("/tokens", x, 0, WIDTH, SIDE * SIDE), 0, 2, 1)
    tokens = _encoder(net, tokens, outlier)
    rows = net.shaped("/rows", net.norm("/norm", tokens), -1, WIDTH)
    rows = net.gemm("/out", net.add("Relu", "/in/Relu", net.gemm("/in", rows, WIDTH, 64, True)), 64, WIDTH, False)
    tokens = net.add("Add", "/decoded/Add", net.shaped("/places", rows, -1, SIDE * SIDE, WIDTH), tokens)
    net.nodes.append(
        helper.make_node("Identity", [net.linear("/classes", tokens, WIDTH, 10, 3.0, -5.0)], ["scores"], "/scores")
    )
    hidden = net.add("Relu", "/box0/Relu", net.linear("/box0", tokens, WIDTH, WIDTH))
    sides = net.linear("/box1", hidden, WIDTH, 4, 0.3)
    centre = (np.arange(SIDE) + 0.5) / SIDE
    places = np.stack([*np.meshgrid(centre, centre), *np.full((2, SIDE, SIDE), 0.3)], -1).reshape(1, -1, 4)
    moved = net.add("Add", "/places/Add", sides, net.const("places", np.log(places / (1 - places))))
    net.nodes.append(helper.make_node("Sigmoid", [moved], ["boxes"], "/boxes"))
    graph = helper.make_graph(
        net.nodes,
        "attention",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, 128, 128])],
        [
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [batch, SIDE * SIDE, 4]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, SIDE * SIDE, 10]),
        ],
        net.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def _area_attention(net: _Net, x: str) -> str:
    """x + proj(attention(qkv(x)) + depthwise(v)), over feature maps."""
    size, places = WIDTH // HEADS, SIDE * SIDE
    qkv = net.shaped("/psa/qkv", net.conv("/psa/qkv/Conv", x, WIDTH, 3 * WIDTH, 1), 0, HEADS, 3 * size, places)
    net.add("Split", "/psa/Split", qkv, net.const("/psa.sizes", [size] * 3, np.int64), outputs=3, axis=2)
    query, key, value = (f"/psa/Split_output_{index}" for index in range(3))
    # As Ultralytics writes it: the values are (B, heads, d, L).
    scores = net.add("MatMul", "/psa/scores/MatMul", net.turned("/psa/query", query, 0, 1, 3, 2), key)
    scaled = net.add("Mul", "/psa/Mul", scores, net.const("/psa.scale", size**-0.5))
    chosen = net.turned("/psa/chosen", net.add("Softmax", "/psa/Softmax", scaled, axis=-1), 0, 1, 3, 2)
    mixed = net.shaped("/psa/mixed", net.add("MatMul", "/psa/values/MatMul", value, chosen), 0, WIDTH, SIDE, SIDE)
    plain = net.shaped("/psa/plain", value, 0, WIDTH, SIDE, SIDE)
    near = net.conv("/psa/pe/Conv", plain, WIDTH, WIDTH, 3, group=WIDTH, pads=[1, 1, 1, 1])
    made = net.conv("/psa/proj/Conv", net.add("Add", "/psa/pe/Add", mixed, near), WIDTH, WIDTH, 1)
    return net.add("Add", "/psa/Add", x, made)


def _encoder(net: _Net, x: str, outlier: float) -> str:
    size, places = WIDTH // HEADS, SIDE * SIDE
    wide = np.where(np.arange(WIDTH) % 16 == 3, outlier, 1.0)
    normal = net.norm("/encoder/norm0", x, wide)
    parts = {part: net.linear(f"/encoder/{part}", normal, WIDTH, WIDTH, 0.3) for part in ("q", "k", "v")}
    heads = {part: net.shaped(f"/encoder/{part}", made, 0, places, HEADS, size) for part, made in parts.items()}
    order = {"q": (0, 2, 1, 3), "k": (0, 2, 3, 1), "v": (0, 2, 1, 3)}
    query, key, value = (net.turned(f"/encoder/{part}", heads[part], *order[part]) for part in heads)
    mixed = net.turned("/encoder/mixed", net.attend("/encoder", query, key, value), 0, 2, 1, 3)
    made = net.linear("/encoder/o", net.shaped("/encoder/mixed", mixed, 0, places, WIDTH), WIDTH, WIDTH)
    x = net.add("Add", "/encoder/Add0", x, made)
    hidden = net.linear("/encoder/fc1", net.norm("/encoder/norm1", x, wide), WIDTH, 64, 0.3)
    share = net.add("Div", "/encoder/Div", hidden, net.const("/encoder.root", np.sqrt(2)))
    gate = net.add("Add", "/encoder/Gate", net.add("Erf", "/encoder/Erf", share), net.const("/encoder.one", 1.0))
    gelu = net.add("Mul", "/encoder/Mul1", hidden, gate)
    gelu = net.add("Mul", "/encoder/Mul2", gelu, net.const("/encoder.half", 0.5))
    return net.add("Add", "/encoder/Add1", x, net.linear("/encoder/fc2", gelu, 64, WIDTH))
