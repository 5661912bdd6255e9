"""Writes the ONNX files of other frameworks with their own exporters, for ``benchmarks/exports.py``.

    python benchmarks/make_exports.py --sources DIR --python PATH -o OUT [--emptied DIR] [NAME ...]

``--sources`` holds check-outs of the frameworks' repositories, named ``OWNER+NAME``; ``--python`` is an interpreter
with torch, torchvision, onnx and the packages that the exporters import. Weights are random, but their statistics are
those of random pictures and their last layers are wide, so that something is detected. A file that is there is not
written again. ``--emptied`` also writes the files without the weights of convolutions and matrix products, compressed,
for tests. The exporters were written for torch's TorchScript exporter and for torch.load of whole models, which are the
defaults for them.
"""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx

PRELUDE = """
import functools, importlib.machinery, os, random, runpy, sys, types
import numpy as np
import torch, torch.onnx
torch.manual_seed(0); np.random.seed(0); random.seed(0)
for name, kind in {'int': int, 'float': float, 'bool': bool, 'object': object}.items():
    if name not in np.__dict__:
        setattr(np, name, kind)
torch.load = functools.partial(torch.load, weights_only=False)
torch.onnx.export = functools.partial(torch.onnx.export, dynamo=False)
torch.onnx._export = torch.onnx.export

def lively(model, size=320, last=(), gain=1.0, call=None):
    '''Normalisation by random pictures, and wide last layers.'''
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()
    coarse = torch.rand(4, 3, size // 16, size // 16).repeat_interleave(16, 2).repeat_interleave(16, 3)
    with torch.no_grad():
        (call or model)((coarse + 0.05 * torch.randn(4, 3, size, size)).clamp(0, 1))
    for norm, momentum in zip(norms, kept):
        norm.momentum = momentum
    for layer in last:
        torch.nn.init.normal_(layer.weight, std=gain / layer.weight[0].numel() ** 0.5)
        if layer.bias is not None:
            torch.nn.init.normal_(layer.bias, -1.0, 1.0)
    return model.eval()

def run(script, *words):
    sys.argv = [script, *map(str, words)]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name='__main__')
"""
"""Runs before every recipe: the defaults that the exporters were written for, and random weights that detect."""


@dataclass(frozen=True)
class Recipe:
    """How a file is written: ``code`` runs in the folder ``source`` of the check-outs, with ``OUT`` the file's path.

    ``torch`` is False for what needs the interpreter with TensorFlow.
    """

    source: str
    code: str
    torch: bool = True


def _yolov7(*words: str, config: str = "yolov7-tiny") -> Recipe:
    return Recipe(
        "WongKinYiu+yolov7",
        f"""
sys.path.insert(0, '.')
from models.yolo import Model
model = Model('cfg/training/{config}.yaml', ch=3, nc=80)
model.names = [str(i) for i in range(80)]
lively(model, last=model.model[-1].m, gain=2.0).requires_grad_(False)
torch.save({{'model': model, 'ema': None}}, OUT.replace('.onnx', '.pt'))
run('export.py', '--weights', OUT.replace('.onnx', '.pt'), '--img-size', '320', '320', {", ".join(map(repr, words))})
""",
    )


def _yolov6(*words: str, source: str = "meituan+YOLOv6", config: str = "yolov6n", needs: str = "") -> Recipe:
    """YOLOv6, and Gold-YOLO, which keeps its exporter; ``needs`` is imported first."""
    return Recipe(
        source,
        f"""
sys.path.insert(0, '.')
{needs}
from yolov6.utils.config import Config
from yolov6.models.yolo import build_model
config = Config.fromfile('configs/{config}.py')
config.training_mode = 'repvgg'
model = build_model(config, 80, torch.device('cpu'))
lively(model)
for layer in model.detect.cls_preds:
    torch.nn.init.normal_(layer.weight, std=0.1)
    torch.nn.init.normal_(layer.bias, -4.0, 1.0)
for layer in model.detect.reg_preds:
    torch.nn.init.normal_(layer.weight, std=0.03)
    torch.nn.init.constant_(layer.bias, 3.0)
torch.save({{'model': model, 'ema': None}}, OUT.replace('.onnx', '.pt'))
run('deploy/ONNX/export_onnx.py', '--weights', OUT.replace('.onnx', '.pt'), '--img-size', '320', '--device', 'cpu',
    {", ".join(map(repr, words))})
""",
    )


def _damo(end: str) -> Recipe:
    return Recipe(
        "tinyvision+DAMO-YOLO",
        f"""
sys.path.insert(0, '.')
tensorrt = types.ModuleType('tensorrt')
tensorrt.__version__, tensorrt.__spec__ = '8.6.0', importlib.machinery.ModuleSpec('tensorrt', None)
sys.modules['tensorrt'] = tensorrt
from damo.config.base import parse_config
from damo.detectors.detector import build_local_model
config = parse_config('configs/damoyolo_tinynasL20_N.py')
model = build_local_model(config, torch.device('cpu'))
lively(torch.nn.Sequential(model.backbone, model.neck))
for layer in model.head.gfl_cls:
    torch.nn.init.normal_(layer.weight, std=0.2)
    torch.nn.init.normal_(layer.bias, -1.0, 1.0)
for layer in model.head.gfl_reg:
    torch.nn.init.normal_(layer.weight, std=0.2)
torch.save(model.state_dict(), OUT.replace('.onnx', '.pth'))
from damo.utils import model_utils
model_utils.get_latency = lambda model, image, iters=1, warmup=0: (model(image), 1.0)  # not of 500 runs
run('tools/converter.py', '-f', 'configs/damoyolo_tinynasL20_N.py', '-c', OUT.replace('.onnx', '.pth'),
    '--batch_size', 1, '--img_size', 320, '--device', 'cpu', '-o', 13 {end})
import shutil
shutil.move('damoyolo_tinynasL20_N{"_end2end" if end else ""}.onnx', OUT)
""",
    )


def _detr(source: str, script: str, config: str, update: str) -> Recipe:
    return Recipe(
        source,
        f"""
import shutil
sys.path.insert(0, '.')
kept = torch.onnx.export
def export(model, data, path, **options):
    return kept(model, data, OUT, **options)
torch.onnx.export = export
from {"src" if source.startswith("lyu") else "engine" if "DEIM" in source else "src"}.core import YAMLConfig
{update}
sys.argv = ['x']
run('{script}', '-c', '{config}')
""",
    )


_NO_WEIGHTS = """
import yaml
def plain(text):
    return text.replace('pretrained: True', 'pretrained: False').replace('pretrained: true', 'pretrained: False')
for folder, _, names in os.walk('configs'):
    for name in names:
        if name.endswith('.yml'):
            path = os.path.join(folder, name)
            old = open(path).read()
            if plain(old) != old:
                open(path, 'w').write(plain(old))
"""

_ULTRALYTICS = """
from ultralytics import YOLO
model = YOLO('{config}')
inner = model.model
head = inner.model[-1]
lively(inner)
for group in (head.cv3, getattr(head, 'one2one_cv3', None) or ()):
    for branch in group:
        layer = [m for m in branch.modules() if isinstance(m, torch.nn.Conv2d)][-1]
        torch.nn.init.normal_(layer.weight, std=0.3)
        torch.nn.init.normal_(layer.bias, -2.0, 1.0)
os.chdir(os.path.dirname(OUT))
path = model.export(format='onnx', imgsz=320, {options})
os.replace(path, OUT)
"""

_TORCHVISION = """
import torchvision
{build}
lively(model.backbone, 320)
def unit(layer, given, out):  # weights such that each layer's output has deviation 1 (arXiv:1511.06422)
    layer.weight.data /= out.std()
    return out / out.std()
layers = [m for m in [*getattr(model.backbone, 'fpn', model.head).modules(), *model.head.modules()]
          if isinstance(m, torch.nn.Conv2d)]
hooks = []
for layer in layers:
    torch.nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        torch.nn.init.zeros_(layer.bias)
    hooks.append(layer.register_forward_hook(unit))
model.eval()
with torch.no_grad():
    model([torch.rand(3, 320, 320)])
for hook in hooks:
    hook.remove()
for layer in model.head.modules():
    if isinstance(layer, torch.nn.Conv2d) and layer.bias is not None:
        torch.nn.init.normal_(layer.bias, -1.0, 1.0)
torch.onnx.export(model, ([torch.rand(3, 320, 320)],), OUT, opset_version=17, input_names=['images'],
                  output_names=['boxes', {names}])
"""


def _ultralytics(options: str, config: str = "yolov8n.yaml") -> Recipe:
    return Recipe(".", _ULTRALYTICS.format(config=config, options=options))


def _torchvision(factory: str, names: str, options: str = "") -> Recipe:
    build = f"model = torchvision.models.detection.{factory}(weights=None, weights_backbone=None, {options})"
    return Recipe(".", _TORCHVISION.format(build=build, names=names))


def _small_torchvision(factory: str, anchors: str, threshold: float) -> Recipe:
    """A detector of two levels and 32 channels, by torchvision's own classes."""
    build = f"""
class Backbone(torch.nn.Module):
    out_channels = 32
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 16, 16), torch.nn.BatchNorm2d(32), torch.nn.ReLU())
        self.next = torch.nn.Sequential(torch.nn.Conv2d(32, 32, 3, 2, 1), torch.nn.BatchNorm2d(32), torch.nn.ReLU())
    def forward(self, x):
        x = self.stem(x)
        return {{'0': x, '1': self.next(x)}}
from torchvision.models.detection.anchor_utils import AnchorGenerator
model = torchvision.models.detection.{factory}(Backbone(), 6, min_size=320, max_size=320, score_thresh={threshold},
                                               anchor_generator=AnchorGenerator({anchors}))"""
    return Recipe(".", _TORCHVISION.format(build=build, names="'scores', 'labels'"))


def _yolo_nas(form: str) -> Recipe:
    return Recipe(
        "Deci-AI+super-gradients/src",
        f"""
sys.path.insert(0, '.')
from super_gradients.training import models
from super_gradients.conversion import DetectionOutputFormatMode
model = models.get('yolo_nas_s', num_classes=80)
lively(model)
for name, layer in model.named_modules():
    if name.endswith('cls_pred'):
        torch.nn.init.normal_(layer.weight, std=0.05)
        torch.nn.init.normal_(layer.bias, -4.0, 1.0)
model.export(OUT, preprocessing=False, input_image_shape=(320, 320),
             output_predictions_format=DetectionOutputFormatMode.{form})
""",
    )


_MMCV = """
import cv2, mmcv, torchvision
mmcv.__version__ = '2.1.0'  # of 2.2, which MMDetection and MMPose refuse, all that is used is the same
def compiled(name):
    if name.startswith('__'):
        raise AttributeError(name)
    return lambda boxes, scores, iou_threshold, offset: torchvision.ops.nms(boxes, scores, iou_threshold)
sys.modules['mmcv._ext'] = types.ModuleType('mmcv._ext')
sys.modules['mmcv._ext'].__spec__ = importlib.machinery.ModuleSpec('mmcv._ext', None)
sys.modules['mmcv._ext'].__getattr__ = compiled
"""
"""mmcv without its compiled operators, of which the rewritten networks need none but the suppression."""


def _mmdeploy(config: str, deploy: str, last: str) -> Recipe:
    """MMDetection by MMDeploy; ``last`` begins the names of the layers that give scores. Of mmcv the package without
    compiled operators is enough: they are rewritten."""
    return Recipe(
        "open-mmlab+mmdeploy",
        f"""
{_MMCV}sys.path.insert(0, '.')
import mmdeploy.apis.utils.utils
import mmdet, mmengine
from mmdet.registry import MODELS
from mmdet.utils import register_all_modules
from mmdeploy.apis import torch2onnx
register_all_modules(init_default_scope=True)
config = mmengine.Config.fromfile(os.path.join(os.path.dirname(mmdet.__file__), '.mim', 'configs', '{config}'))
model = MODELS.build(config.model)
pixels = model.data_preprocessor
def forward(pictures):
    pictures = 255 * pictures
    model.bbox_head(model.extract_feat((pictures - pixels.mean) / pixels.std if pixels._enable_normalize else pictures))
lively(model, call=forward)
for name, layer in model.bbox_head.named_modules():
    if isinstance(layer, torch.nn.Conv2d) and name.startswith('{last}'):
        torch.nn.init.normal_(layer.weight, std=0.5 / layer.weight[0].numel() ** 0.5)
        if layer.bias is not None:
            torch.nn.init.normal_(layer.bias, -2.0, 1.0)
    if isinstance(layer, torch.nn.Conv2d) and name.startswith('rtm_reg'):  # distances, positive once trained
        torch.nn.init.normal_(layer.weight, std=0.1 / layer.weight[0].numel() ** 0.5)
        torch.nn.init.constant_(layer.bias, 3.0)
torch.save({{'state_dict': model.state_dict(), 'meta': {{'dataset_meta': {{}}}}}}, OUT.replace('.onnx', '.pth'))
cv2.imwrite(OUT.replace('.onnx', '.png'), np.random.randint(0, 255, (320, 320, 3), np.uint8))
deploy = mmengine.Config.fromfile('configs/mmdet/detection/{deploy}')
mmdeploy.apis.utils.utils.check_backend_device = lambda deploy_cfg, device: None  # files for TensorRT need no GPU
deploy.onnx_config.input_shape = None if 'dynamic' in '{deploy}' else [320, 320]
torch2onnx(OUT.replace('.onnx', '.png'), os.path.dirname(OUT), os.path.basename(OUT), deploy_cfg=deploy,
           model_cfg=config, model_checkpoint=OUT.replace('.onnx', '.pth'), device='cpu')
""",
    )


def _mmpose(config: str, deploy: str) -> Recipe:
    """MMPose by MMDeploy, packages as for :func:`_mmdeploy`; MMPose is a check-out beside MMDeploy's, and needs
    pycocotools, json_tricks and munkres."""
    return Recipe(
        "open-mmlab+mmdeploy",
        f"""
{_MMCV}import pycocotools.coco, pycocotools.cocoeval, pycocotools.mask
for name in ('', '.coco', '.cocoeval', '.mask'):  # its fork, which NumPy 2 does not load, scores data sets
    sys.modules['xtcocotools' + name] = sys.modules['pycocotools' + name]
sys.modules['chumpy'] = types.ModuleType('chumpy')  # of body models, which these are not
sys.path[:0] = ['.', '../open-mmlab+mmpose']
import mmdeploy.apis.utils.utils
import mmengine
import mmpose
from mmpose.registry import MODELS
from mmpose.utils import register_all_modules
from mmdeploy.apis import torch2onnx
register_all_modules(init_default_scope=True)
os.chdir('../open-mmlab+mmpose')  # for the descriptions of data sets
config = mmengine.Config.fromfile('configs/body_2d_keypoint/{config}')
config.model.backbone.init_cfg = None
model = MODELS.build(config.model)
def forward(pictures):
    model.head.head_module(model.extract_feat(255 * pictures))
lively(model, size=config.input_size[0], call=forward)
for name, layer in model.head.named_modules():
    kind = name.split('.')[-2] if name.endswith(('.0', '.1', '.2')) else ''
    if isinstance(layer, torch.nn.Conv2d) and kind in ('out_cls', 'out_obj'):
        torch.nn.init.normal_(layer.weight, std=2 / layer.weight[0].numel() ** 0.5)
        torch.nn.init.normal_(layer.bias, -1.0, 0.5)
    if isinstance(layer, torch.nn.Conv2d) and kind == 'out_bbox':
        torch.nn.init.normal_(layer.weight, std=0.5 / layer.weight[0].numel() ** 0.5)
        torch.nn.init.constant_(layer.bias, 1.0)
torch.save({{'state_dict': model.state_dict(), 'meta': {{'dataset_meta': {{}}}}}}, OUT.replace('.onnx', '.pth'))
cv2.imwrite(OUT.replace('.onnx', '.png'), np.random.randint(0, 255, (320, 320, 3), np.uint8))
deploy = mmengine.Config.fromfile('../open-mmlab+mmdeploy/configs/mmpose/{deploy}')
mmdeploy.apis.utils.utils.check_backend_device = lambda deploy_cfg, device: None  # files for TensorRT need no GPU
torch2onnx(OUT.replace('.onnx', '.png'), os.path.dirname(OUT), os.path.basename(OUT), deploy_cfg=deploy,
           model_cfg=config, model_checkpoint=OUT.replace('.onnx', '.pth'), device='cpu')
""",
    )


def _yolov5_face(source: str, classes: int) -> Recipe:
    """YOLOv5-face and its fork for licence plates: rows with five or four landmarks behind the objectness."""
    return Recipe(
        source,
        f"""
sys.path.insert(0, '.')
from models.yolo import Model
model = Model('models/yolov5n-0.5.yaml', ch=3, nc={classes})
model.names = [str(i) for i in range({classes})]
lively(model, last=model.model[-1].m, gain=2.0).requires_grad_(False)
torch.save({{'model': model, 'ema': None}}, OUT.replace('.onnx', '.pt'))
run('export.py', '--weights', OUT.replace('.onnx', '.pt'), '--img_size', '320', '320')
""",
    )


_TENSORFLOW = """
import numpy as np
import tensorflow as tf
import tf2onnx
tf.keras.utils.set_random_seed(0)
backbone = tf.keras.applications.MobileNetV2(input_shape=(320, 320, 3), include_top=False, weights=None, alpha=0.35)
levels, cells = [], []
for name, stride, sizes in (('block_13_expand_relu', 16, (0.1, 0.2)), ('out_relu', 32, (0.4, 0.6))):
    features = backbone.get_layer(name).output
    for count in (4, 21):
        head = tf.keras.layers.Conv2D(6 * count, 3, padding='same')(features)
        levels.append(tf.keras.layers.Reshape((-1, count))(head))
    y, x = np.meshgrid(*[(np.arange(320 // stride) + 0.5) * stride / 320] * 2, indexing='ij')
    shapes = [(size * root, size / root) for size in sizes for root in (1, 2**0.5, 0.5**0.5)]
    cells.append(np.stack([np.stack([y, x, y * 0 + h, x * 0 + w], -1) for h, w in shapes], 2).reshape(-1, 4))
model, anchors = tf.keras.Model(backbone.input, levels), np.concatenate(cells).astype(np.float32)
for layer in model.layers:
    layer.momentum = 0.0  # normalisation by random pictures
model(np.random.rand(8, 20, 20, 3).repeat(16, 1).repeat(16, 2).astype(np.float32) * 2 - 1, training=True)

@tf.function(input_signature=[tf.TensorSpec((1, 320, 320, 3), tf.uint8, name='input_tensor')])
def detect(image):
    boxes, scores, more_boxes, more_scores = model(tf.cast(image, tf.float32) * (2 / 255) - 1, training=False)
    boxes, scores = tf.concat([boxes, more_boxes], 1), tf.sigmoid(tf.concat([scores, more_scores], 1))[..., 1:]
    centre, size = boxes[..., :2] / 10 * anchors[:, 2:] + anchors[:, :2], tf.exp(boxes[..., 2:] / 5) * anchors[:, 2:]
    boxes = tf.concat([centre - size / 2, centre + size / 2], -1)[:, :, None]
    found = tf.image.combined_non_max_suppression(boxes, scores, 100, 100, 0.6, 0.3, clip_boxes=False)
    return {'detection_boxes': found.nmsed_boxes, 'detection_scores': found.nmsed_scores,
            'detection_classes': found.nmsed_classes + 1, 'num_detections': tf.cast(found.valid_detections, tf.float32)}
tf2onnx.convert.from_function(detect, input_signature=detect.input_signature, opset=17, output_path=OUT)
"""
"""An SSD as TensorFlow's object detection exports it, with Keras' MobileNetV2 and TensorFlow's combined suppression."""

_TENSORFLOW_MODELS = """
import os, subprocess, sys, tempfile, types
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"  # the package's messages are of an older protobuf
sys.path[:0] = [".", "slim"]
import keras, tensorflow as tf
from keras.src.layers.preprocessing import image_preprocessing
moved = types.ModuleType("keras.layers.preprocessing")  # where older versions of Keras had it
moved.image_preprocessing = image_preprocessing
sys.modules[moved.__name__], sys.modules[f"{moved.__name__}.image_preprocessing"] = moved, image_preprocessing
from google.protobuf import text_format
from object_detection import exporter_lib_v2
from object_detection.builders import model_builder
from object_detection.protos import pipeline_pb2
LAYERS = '''conv_hyperparams { regularizer { l2_regularizer { weight: 4e-5 } } activation: RELU_6
  batch_norm { decay: 0.97 center: true scale: true epsilon: 0.001 train: true } '''
CONFIG = '''model { ssd { num_classes: 6 image_resizer { fixed_shape_resizer { height: 160 width: 160 } }
  feature_extractor { type: "ssd_mobilenet_v2_keras" depth_multiplier: 0.25 min_depth: 8
    ''' + LAYERS + ''' initializer { variance_scaling_initializer { factor: 2 uniform: false mode: FAN_IN } } }
    override_base_feature_extractor_hyperparams: true }
  box_coder { faster_rcnn_box_coder { y_scale: 10 x_scale: 10 height_scale: 5 width_scale: 5 } }
  matcher { argmax_matcher { matched_threshold: 0.5 unmatched_threshold: 0.5 } }
  similarity_calculator { iou_similarity { } }
  box_predictor { convolutional_box_predictor { kernel_size: 1 box_code_size: 4 class_prediction_bias_init: -2
    ''' + LAYERS + ''' initializer { random_normal_initializer { mean: 0 stddev: 0.2 } } } } }
  anchor_generator { ssd_anchor_generator { num_layers: 6 min_scale: 0.2 max_scale: 0.95
    aspect_ratios: 1 aspect_ratios: 2 aspect_ratios: 0.5 aspect_ratios: 3 aspect_ratios: 0.3333 } }
  post_processing { batch_non_max_suppression { score_threshold: 1e-8 iou_threshold: 0.6
    max_detections_per_class: 100 max_total_detections: 100 } score_converter: SIGMOID }
  loss { localization_loss { weighted_smooth_l1 { } } classification_loss { weighted_sigmoid_focal { } } }
  encode_background_as_zeros: true inplace_batchnorm_update: true } }'''
pipeline = text_format.Parse(CONFIG, pipeline_pb2.TrainEvalPipelineConfig())
tf.random.set_seed(3)
model = model_builder.build(pipeline.model, is_training=False)
image, shapes = model.preprocess(tf.random.uniform((1, 160, 160, 3), 0, 255))
model.postprocess(model.predict(image, shapes), shapes)
with tempfile.TemporaryDirectory() as folder:
    tf.train.Checkpoint(model=model).save(f"{folder}/checkpoint/weights")
    exporter_lib_v2.export_inference_graph("image_tensor", pipeline, f"{folder}/checkpoint", f"{folder}/exported")
    del os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"]  # many times slower
    subprocess.run([sys.executable, "-m", "tf2onnx.convert", "--saved-model", f"{folder}/exported/saved_model",
                    "--output", OUT, "--opset", "13"], check=True)
"""
"""An SSD by the exporter of TensorFlow's object detection (exporter_lib_v2): a loop over the images of the batch
resizes and normalises them, and each class has a suppression of its own."""

RECIPES = {
    "ultralytics-yolov8n-nms": _ultralytics("nms=True"),
    "ultralytics-yolov8n-nms-agnostic": _ultralytics("nms=True, agnostic_nms=True, max_det=50"),
    "ultralytics-yolov8n-nms-batch2": _ultralytics("nms=True, batch=2"),
    "ultralytics-yolov8n-nms-dynamic": _ultralytics("nms=True, dynamic=True"),
    "ultralytics-yolo11n": _ultralytics("dynamic=True", config="yolo11n.yaml"),
    "ultralytics-yolo26n": _ultralytics("", config="yolo26n.yaml"),
    "ultralytics-yolo26n-nms": _ultralytics("nms=True", config="yolo26n.yaml"),
    "ultralytics-yolov10n": _ultralytics("", config="yolov10n.yaml"),
    "yolov7-grid": _yolov7("--grid"),
    "yolov7-raw-maps": _yolov7(),
    "yolov7-end2end-ort": _yolov7("--grid", "--end2end", "--max-wh", "640", "--conf-thres", "0.1"),
    "yolov7-end2end-trt": _yolov7("--grid", "--end2end", "--conf-thres", "0.1"),
    "yolov6n": _yolov6(),
    "yolov6n-end2end-ort": _yolov6("--end2end", "--ort", "--conf-thres", "0.3"),
    "yolov6n-end2end-trt": _yolov6("--end2end", "--conf-thres", "0.3"),
    "gold-yolo-n": _yolov6(
        source="huawei-noah+Efficient-Computing/Detection/Gold-YOLO",
        config="gold_yolo-n",
        needs="from gold_yolo.switch_tool import switch_to_deploy",
    ),
    "damo-yolo-n": _damo(""),
    "damo-yolo-n-end2end-trt": _damo(", '--end2end'"),
    "rtdetrv2-r18": _detr(
        "lyuwenyu+RT-DETR/rtdetrv2_pytorch",
        "tools/export_onnx.py",
        "configs/rtdetrv2/rtdetrv2_r18vd_120e_coco.yml",
        _NO_WEIGHTS,
    ),
    "dfine-n": _detr(
        "Peterande+D-FINE", "tools/deployment/export_onnx.py", "configs/dfine/dfine_hgnetv2_n_coco.yml", _NO_WEIGHTS
    ),
    "deim-dfine-n": _detr(
        "ShihuaHuang95+DEIM",
        "tools/deployment/export_onnx.py",
        "configs/deim_dfine/deim_hgnetv2_n_coco.yml",
        _NO_WEIGHTS,
    ),
    "torchvision-ssdlite320": _torchvision(
        "ssdlite320_mobilenet_v3_large", "'scores', 'labels'", "num_classes=21, score_thresh=0.2, topk_candidates=9999"
    ),
    "torchvision-ssd300-vgg16": _torchvision(
        "ssd300_vgg16", "'scores', 'labels'", "num_classes=21, score_thresh=0.2, topk_candidates=9999"
    ),
    "torchvision-retinanet": _torchvision(
        "retinanet_resnet50_fpn", "'scores', 'labels'", "num_classes=21, min_size=320, max_size=320, score_thresh=0.93"
    ),
    "torchvision-fcos": _torchvision(
        "fcos_resnet50_fpn", "'scores', 'labels'", "num_classes=21, min_size=320, max_size=320, score_thresh=0.9"
    ),
    "torchvision-retinanet-small": _small_torchvision("RetinaNet", "((32, 48), (64, 96)), ((0.5, 1.0, 2.0),) * 2", 0.6),
    "torchvision-fcos-small": _small_torchvision("FCOS", "((16,), (32,)), ((1.0,),) * 2", 0.5),
    "rfdetr-nano": Recipe(
        ".",
        """
from rfdetr import RFDETRNano
model = RFDETRNano(pretrain_weights=None)
os.chdir(os.path.dirname(OUT))
model.export(output_dir='rfdetr-out')
os.replace('rfdetr-out/rfdetr-nano.onnx', OUT)
""",
    ),
    "efficientdet-d0": Recipe(
        "zylo117+Yet-Another-EfficientDet-Pytorch",
        """
sys.path.insert(0, '.')
from backbone import EfficientDetBackbone
class Outputs(torch.nn.Module):  # without the pyramid's maps, which it gives first
    def __init__(self):
        super().__init__()
        self.model = EfficientDetBackbone(num_classes=90, compound_coef=0, onnx_export=True)
        self.model.backbone_net.model.set_swish(memory_efficient=False)
    def forward(self, image):
        return self.model(image)[1:]
model = Outputs()
last = [model.model.classifier.header.pointwise_conv.conv, model.model.regressor.header.pointwise_conv.conv]
lively(model, size=512, last=last, gain=0.3)
last[1].weight.data *= 0.03  # sides are exponents, which else overflow on other pictures
model.model.anchors.last_shape = None  # else anchors are kept, not a part of the trace
torch.onnx.export(model, torch.rand(1, 3, 512, 512), OUT, opset_version=12, dynamo=False, input_names=['input'],
                  output_names=['regression', 'classification', 'anchors'])
""",
    ),
    "lwdetr-tiny": Recipe(
        "Atten4Vis+LW-DETR",
        """
sys.path.insert(0, '.')
def stand_in(name, **content):  # of what only training, CUDA and TensorRT need
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)
for name in ('MultiScaleDeformableAttention', 'fairscale', 'fairscale.nn'):
    stand_in(name)
stand_in('fairscale.nn.checkpoint', checkpoint_wrapper=None)
stand_in('deploy._onnx', OnnxOptimizer=None)
kept = torch.onnx.export
def export(model, data, path, **options):
    torch.nn.init.normal_(model.class_embed.weight, std=0.3)
    return kept(model, data, OUT, **options)
torch.onnx.export = export
run('main.py', *'''--batch_size 1 --encoder vit_tiny --vit_encoder_num_layers 6 --window_block_indexes 0 2 4
    --out_feature_indexes 1 3 5 --dec_layers 3 --group_detr 13 --two_stage --projector_scale P4 --hidden_dim 256
    --sa_nheads 8 --ca_nheads 16 --dec_n_points 2 --bbox_reparam --lite_refpoint_refine --num_queries 100
    --num_select 100 --dataset_file coco --square_resize_div_64 --use_ema --eval
    export_model'''.split())
""",
    ),
    "mmdeploy-rtmdet-tiny": _mmdeploy(
        "rtmdet/rtmdet_tiny_8xb32-300e_coco.py", "detection_onnxruntime_static.py", "rtm_cls"
    ),
    "mmdeploy-rtmdet-tiny-dynamic": _mmdeploy(
        "rtmdet/rtmdet_tiny_8xb32-300e_coco.py", "detection_onnxruntime_dynamic.py", "rtm_cls"
    ),
    "mmdeploy-rtmdet-tiny-trt": _mmdeploy(
        "rtmdet/rtmdet_tiny_8xb32-300e_coco.py", "detection_tensorrt_static-320x320.py", "rtm_cls"
    ),
    "mmdeploy-yolox-tiny": _mmdeploy(
        "yolox/yolox_tiny_8xb8-300e_coco.py", "detection_onnxruntime_static.py", "multi_level_conv_cls"
    ),
    "mmdeploy-atss-r18": _mmdeploy(
        "atss/atss_r18_fpn_8xb8-amp-lsj-200e_coco.py", "detection_onnxruntime_static.py", "atss_cls"
    ),
    "mmdeploy-retinanet-r18": _mmdeploy(
        "retinanet/retinanet_r18_fpn_1xb8-1x_coco.py", "detection_onnxruntime_static.py", "retina_cls"
    ),
    "mmdeploy-ssdlite": _mmdeploy(
        "ssd/ssdlite_mobilenetv2-scratch_8xb24-600e_coco.py", "detection_onnxruntime_static.py", "cls_convs"
    ),
    "mmdeploy-yolov3": _mmdeploy(
        "yolo/yolov3_mobilenetv2_8xb24-320-300e_coco.py", "detection_onnxruntime_static.py", "convs_pred"
    ),
    "mmpose-rtmo-t": _mmpose(
        "rtmo/body7/rtmo-t_8xb32-600e_body7-416x416.py", "pose-detection_rtmo_onnxruntime_dynamic.py"
    ),
    "mmpose-rtmo-t-trt": _mmpose(
        "rtmo/body7/rtmo-t_8xb32-600e_body7-416x416.py", "pose-detection_rtmo_tensorrt-fp16_dynamic-640x640.py"
    ),
    "mmpose-yolox-pose-tiny": _mmpose(
        "yoloxpose/coco/yoloxpose_tiny_4xb64-300e_coco-416.py", "pose-detection_yolox-pose_onnxruntime_dynamic.py"
    ),
    "mmpose-yolox-pose-tiny-trt": _mmpose(
        "yoloxpose/coco/yoloxpose_tiny_4xb64-300e_coco-416.py", "pose-detection_yolox-pose_tensorrt_dynamic-640x640.py"
    ),
    "tensorflow-ssd": Recipe(".", _TENSORFLOW, torch=False),
    "tensorflow-models-ssd": Recipe("tf_models_research_object_detection", _TENSORFLOW_MODELS, torch=False),
    "yolov5-face": _yolov5_face("deepcam-cn+yolov5-face", classes=1),
    "yolov5-plate": _yolov5_face("we0091234+Chinese_license_plate_detection_recognition", classes=2),
    "yolo-nas-s-flat": _yolo_nas("FLAT_FORMAT"),
    "yolo-nas-s-batch": _yolo_nas("BATCH_FORMAT"),
}


def write(name: str, recipe: Recipe, sources: Path, python: Path, out: Path) -> str:
    """Runs a recipe; returns what went wrong, or an empty text."""
    target = out / f"{name}.onnx"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(f"{PRELUDE if recipe.torch else ''}\nOUT = {str(target)!r}\n{recipe.code}")
        script.flush()
        run = subprocess.run([python, script.name], cwd=sources / recipe.source, capture_output=True, text=True)
    (out / f"{name}.log").write_text(run.stdout + run.stderr)
    return "" if target.is_file() else (run.stderr.strip().splitlines() or ["no output"])[-1]


def emptied(path: Path) -> bytes:
    """The file without the values of weights, compressed: a few dozen kilobytes."""
    model = onnx.load(str(path))
    weights = {
        node.input[1]
        for node in model.graph.node
        if node.op_type in ("Conv", "ConvTranspose", "MatMul", "Gemm") and len(node.input) > 1
    }
    # Paddle2ONNX keeps weights in nodes.
    constants = [(node.output[0], node.attribute[0].t) for node in model.graph.node if node.op_type == "Constant"]
    for name, tensor in [*((tensor.name, tensor) for tensor in model.graph.initializer), *constants]:
        if name in weights and tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.raw_data) > 256:
            tensor.ClearField("raw_data")
    del model.graph.value_info[:]
    for node in model.graph.node:
        node.ClearField("doc_string")
    return lzma.compress(model.SerializeToString(), preset=9 | lzma.PRESET_EXTREME)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of {', '.join(RECIPES)}")
    parser.add_argument("--sources", type=Path, required=True, help="check-outs of the frameworks")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter with torch")
    parser.add_argument("--tensorflow", type=Path, help="interpreter with tensorflow and tf2onnx, for files of its own")
    parser.add_argument("--emptied", type=Path, help="folder of the files without weights")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the files")
    options = parser.parse_args()
    out = options.output.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.names or RECIPES:
        python = options.python if RECIPES[name].torch else options.tensorflow
        if python is None:
            print(f"{name}: not written, as --tensorflow is not given", flush=True)
        elif not (out / f"{name}.onnx").is_file():
            problem = write(name, RECIPES[name], sources=options.sources.resolve(), python=python, out=out)
            failed += bool(problem)
            print(f"{name}: {problem or 'written'}", flush=True)
        if options.emptied is not None and (out / f"{name}.onnx").is_file():
            (options.emptied / f"{name}.onnx.xz").write_bytes(emptied(out / f"{name}.onnx"))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
