"""The shipped configurations read the outputs that the exporters of their families write."""

import numpy as np
import pytest

from trtdet.config import load_config, shipped
from trtdet.detection.heads import decode, decode_all
from trtdet.detection.suppression import non_max_suppression


def grids(size: int, *strides: int) -> list[int]:
    return [(-(-size // stride)) ** 2 for stride in strides]


ANCHORS = sum(grids(640, 8, 16, 32))
FOUR = sum(grids(416, 8, 16, 32, 64))
Shapes = tuple[tuple[int, ...], ...]
OUTPUTS: dict[str, Shapes] = {
    "yolox": ((1, sum(grids(416, 8, 16, 32)), 85),),
    "shapes": ((1, sum(grids(256, 8, 16, 32)), 15),),
    **dict.fromkeys(("yolov5", "yolov7"), ((1, 25200, 85),)),
    "yolov5-face": ((1, 25200, 16),),
    "yolov5-plate": ((1, 25200, 15),),
    "yolov6": ((1, ANCHORS, 85),),
    "damo-yolo": ((1, ANCHORS, 80), (1, ANCHORS, 4)),
    **dict.fromkeys(("yolov8", "yolov9", "yolo11", "yolo12"), ((1, 84, ANCHORS),)),
    **dict.fromkeys(("yolov10", "yolo26"), ((1, 300, 6),)),
    **dict.fromkeys(("yolov8-seg", "yolo11-seg"), ((1, 84 + 32, ANCHORS), (1, 32, 160, 160))),
    **dict.fromkeys(("yolov8-pose", "yolo11-pose"), ((1, 5 + 51, ANCHORS),)),
    **dict.fromkeys(("yolov8-obb", "yolo11-obb"), ((1, 19 + 1, sum(grids(1024, 8, 16, 32))),)),
    "yolo26-seg": ((1, 300, 6 + 32), (1, 32, 160, 160)),
    "yolo26-pose": ((1, 300, 6 + 51),),
    "yolo26-obb": ((1, 300, 6 + 1),),
    "yolov5-seg": ((1, 25200, 85 + 32), (1, 32, 160, 160)),
    **dict.fromkeys(("dfl", "picodet", "nanodet"), ((1, FOUR, 112),)),
    "rtmo": tuple((1, sum(grids(640, 16, 32)), columns) for columns in (4, 1, 51)),
    "yolox-pose": tuple((1, ANCHORS, columns) for columns in (4, 1, 51)),
    "ppyoloe": ((1, ANCHORS, 84),),
    "rtmdet": tuple((1, channels, 640 // stride, 640 // stride) for channels in (80, 4) for stride in (8, 16, 32)),
    **dict.fromkeys(("rtdetr", "dfine"), ((1, 300, 80), (1, 300, 4))),
    "rfdetr": ((1, 300, 4), (1, 300, 91)),
    "fastestdet": ((1, 85, 22, 22),),
    "efficientdet": tuple((1, 9 * sum(grids(512, 8, 16, 32, 64, 128)), columns) for columns in (4, 90, 4)),
    **dict.fromkeys(
        ("scrfd", "scrfd-kps"),
        tuple((1, 2 * cells, columns) for columns in (1, 4, 10) for cells in grids(640, 8, 16, 32)),
    ),
    **dict.fromkeys(("retinaface", "retinaface-kps"), tuple((1, 2 * ANCHORS, columns) for columns in (4, 2, 10))),
    **dict.fromkeys(
        ("yunet", "yunet-kps"),
        tuple((1, cells, columns) for columns in (1, 1, 4, 10) for cells in grids(640, 8, 16, 32)),
    ),
}
WITHOUT_NMS = {"yolov10", "yolo26", "yolo26-seg", "yolo26-pose", "yolo26-obb", "rtdetr", "dfine", "rfdetr"}

PARTS = {
    "seg": ("mask_coefficients", "prototypes"),
    "pose": ("keypoints",),
    **dict.fromkeys(("kps", "face", "plate", "rtmo"), ("keypoints",)),
    "obb": ("rotated_boxes",),
}


def test_every_shipped_configuration_is_tested_here():
    assert OUTPUTS.keys() == shipped("configs").keys()


@pytest.mark.parametrize("name", OUTPUTS)
def test_it_reads_the_outputs_of_its_family(name):
    config = load_config(name)
    rng = np.random.default_rng(0)
    outputs = {f"o{at}": rng.uniform(0, 1, shape).astype(np.float32) for at, shape in enumerate(OUTPUTS[name])}
    if config.head.decode == "detections":
        outputs["o0"][..., 5] = len(config.classes) - 1
    boxes, scores, parts = decode_all(outputs, config)
    assert tuple(parts.items()) == PARTS.get(name.partition("-")[2] or name, ())
    assert boxes.shape[:2] == scores.shape[:2]
    assert (boxes.shape[2], scores.shape[2]) == (4, len(config.classes))
    assert config.nms.suppresses == (name not in WITHOUT_NMS)
    few = config.with_nms(pre_nms_topk=300).nms
    assert non_max_suppression(boxes, scores, few, logits=config.suppresses_logits).num_dets[0, 0] > 0


def test_the_columns_of_rfdetr_are_the_category_ids_of_coco():
    columns = load_config("rfdetr").head.columns
    assert columns is not None
    assert set(range(91)) - set(columns) == {0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
    assert list(columns) == sorted(columns)


def test_a_distance_of_rtmdet_is_from_the_corner_of_its_cell():
    config = load_config("rtmdet")
    outputs = [np.zeros(shape, np.float32) for shape in OUTPUTS["rtmdet"]]
    outputs[0][0, 7, 3, 5] = 9.0
    outputs[3][0, :, 3, 5] = (1, 2, 3, 4)
    boxes, scores = decode(outputs, config)
    np.testing.assert_array_equal(boxes[0, 3 * 80 + 5], [40 - 1, 24 - 2, 40 + 3, 24 + 4])
    assert scores[0].argmax() == (3 * 80 + 5) * 80 + 7
