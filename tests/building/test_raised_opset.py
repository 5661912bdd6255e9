"""The opset of a model is raised for FP16 scales."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from trtdet.backends import Capabilities
from trtdet.building.graph import build_graph, host_graph
from trtdet.building.ranges import calibrated, select_images
from trtdet.options import BuildOptions, CalibrationOptions, changed
from trtdet.passes.opset import HALF_SCALES
from trtdet.quantization import DataFlow

HALF = Capabilities("half", "1", True, True, data_flow=DataFlow(half=True))


def opset_of(model: onnx.ModelProto) -> int:
    return next(entry.version for entry in model.opset_import if entry.domain == "")


@pytest.mark.parametrize(
    ("caps", "changes", "opset"),
    [
        (HALF, {}, HALF_SCALES),
        (replace(HALF, max_opset=20), {}, HALF_SCALES),
        (replace(HALF, max_opset=HALF_SCALES), {}, HALF_SCALES),
        (replace(HALF, max_opset=17), {}, 17),
        (replace(HALF, data_flow=DataFlow()), {}, 13),
        (HALF, {"precision": "fp16"}, 13),
        (HALF, {"quantization": "implicit"}, 13),
    ],
)
def test_a_model_with_pairs_is_raised_where_the_backend_reads_scales_in_fp16(tiny, caps, changes, opset):
    backend: Any = SimpleNamespace(capabilities=caps)
    graph = build_graph(tiny.model, tiny.config, changed(BuildOptions(), **changes), backend)
    assert opset_of(graph.model) == opset
    assert graph.flow.half == (opset >= HALF_SCALES)


def test_histograms_serve_backends_of_every_opset(tiny):
    options = CalibrationOptions(images=tiny.images, num_images=4)
    selected = select_images(options)
    graphs = [host_graph(tiny.model, tiny.config, caps=caps) for caps in (None, HALF)]
    assert [opset_of(graph.model) for graph in graphs] == [13, HALF_SCALES]
    assert [opset_of(graph.with_own_activations) for graph in graphs] == [13, 13]
    first, second = (calibrated(graph, options, selected) for graph in graphs)
    assert first.collection.key == second.collection.key
    assert first.ranges.tensors == second.ranges.tensors
    assert graphs[0].placement.activations == graphs[1].placement.activations
