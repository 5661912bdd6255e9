"""MaxPool(x, 9), beside MaxPool(x, 5) -> MaxPool(MaxPool(x, 5), 5)"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import onnx_graphsurgeon as gs

from trtdet.passes.base import Options, PassResult
from trtdet.passes.walk import maker


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Makes a maximum over a large window from that over a smaller one of the same tensor.

    Spatial pyramid pooling (YOLOX, YOLOv3-SPP, YOLOv4, YOLOv5 up to 5.0) takes maxima over 5x5, 9x9 and 13x13. The
    maximum over 9x9 is that over 5x5 of maxima over 5x5: the same numbers by fewer comparisons, and a DLA takes windows
    up to 8x8. YOLOv5 6.0 has this form, SPPF (https://github.com/ultralytics/yolov5/pull/4420).
    """
    count = 0
    for tensor in graph.tensors().values():
        if maker(tensor, "DequantizeLinear") is not None:
            continue  # pools of quantised tensors are quantised each
        pools = {int(node.attrs["kernel_shape"][0]): node for node in tensor.outputs if _centred(node)}
        for smaller, larger in pairwise(sorted(pools)):
            rest = larger - smaller + 1
            pools[larger].inputs = [pools[smaller].outputs[0]]
            pools[larger].attrs.update(kernel_shape=[rest, rest], pads=[rest // 2] * 4)
            count += 1
    if count:
        graph.toposort()
    return PassResult(count)


def _centred(node: gs.Node) -> bool:
    """Whether a node gives the maximum over a square around each pixel."""
    if node.op != "MaxPool" or len(node.outputs) != 1:
        return False
    kernel = node.attrs.get("kernel_shape", [])
    if len(kernel) != 2 or kernel[0] != kernel[1] or kernel[0] % 2 == 0:
        return False
    usual: dict[str, Any] = {"auto_pad": "NOTSET", "ceil_mode": 0, "dilations": [1, 1], "strides": [1, 1]}
    kept = all(node.attrs.get(name, value) == value for name, value in usual.items())
    return kept and node.attrs.get("pads") == [kernel[0] // 2] * 4
