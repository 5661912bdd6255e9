"""Loading and rewriting a damaged model succeeds or raises an error of trtdet."""

import random

import onnx
import pytest
from mutations import MUTATIONS, detector

from trtdet.errors import TrtdetError
from trtdet.passes import Options, embedded_nms, load_model, rewrite


@pytest.fixture(name="detector")
def sound():
    return detector()


def test_the_whole_model_is_rewritten(detector, configure, tmp_path):
    onnx.save(detector, str(tmp_path / "m.onnx"))
    config = configure(size=(16, 16), nms={"pre_nms_topk": 8, "max_detections": 4})
    done = rewrite(load_model(tmp_path / "m.onnx"), Options(config, nms="native", batch=1))
    assert [value.name for value in done.model.graph.output] == ["num_dets", "boxes", "scores", "classes"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_damaged_model_is_rewritten_or_refused(detector, configure, tmp_path, mutation):
    path = tmp_path / "m.onnx"
    config = configure(size=(16, 16), nms={"pre_nms_topk": 8, "max_detections": 4})
    for seed in range(8):
        draw = random.Random(f"{mutation.__name__} {seed}")
        model = onnx.ModelProto.FromString(detector.SerializeToString())
        mutation(model, draw)
        if seed > 4:
            draw.choice(MUTATIONS)(model, draw)
        path.write_bytes(model.SerializeToString())
        options = Options(
            config, nms="native", batch=draw.choice([1, 2]), silu=draw.choice(["keep", "swish", "plugin"])
        )
        try:
            loaded = load_model(path)
            embedded_nms(loaded, config)
            rewrite(loaded, options)
        except TrtdetError as error:
            assert "\n" not in str(error)
