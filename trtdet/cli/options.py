"""Options that several commands share: their names, types, defaults and help, and what they become.

Most choices are written out here, since reading them from their owners would load NumPy and ONNX for ``--help``;
tests/cli compares them with the tables that they come from.
"""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import add_renamed
from trtdet.errors import ConfigError

if TYPE_CHECKING:
    from trtdet.config import Config
    from trtdet.pipeline import CalibrationOptions

RULES = ("minmax", "entropy", "percentile", "mse", "auto")
CORRECTIONS = ("range", "smooth", "shift", "round", "bias", "reconstruct")
EFFORTS = {
    "quick": ("smooth", "round", "bias"),
    "default": ("range", "smooth", "round", "bias"),
    "thorough": ("range", "smooth", "round", "bias", "reconstruct"),
}
"""As :data:`trtdet.quantization.EFFORTS`, which is not imported before it is needed."""
SILU = ("auto", "keep", "swish", "plugin")
NMS = ("auto", "efficient", "onnx", "native", "host")
OBJECTIVES = ("latency", "throughput", "size")
RUNTIMES = ("auto", "engine", "onnxruntime")


def add_model(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a float ONNX model")
    parser.add_argument(
        "--config", required=True, help="what its input and outputs mean: a YAML file, or a shipped name such as yolox"
    )


def add_target(parser: ArgumentParser, several: bool = False) -> None:
    """A bundle, or a model with its configuration."""
    name, what = ("targets", "bundles or ONNX models") if several else ("target", "a bundle or an ONNX model")
    parser.add_argument(name, type=Path, nargs="+" if several else None, metavar="BUNDLE|MODEL", help=what)
    parser.add_argument("--config", help="YAML file or shipped name; required for a MODEL; a BUNDLE has its own")


def add_output(parser: ArgumentParser, metavar: str, what: str, required: bool = True) -> None:
    parser.add_argument("-o", "--output", type=Path, required=required, metavar=metavar, help=what)


def add_images(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("calibration images")
    group.add_argument("--images", type=Path, metavar="DIR|LIST", help="a folder, or a .txt list of file names")
    group.add_argument(
        "--images-root", type=Path, metavar="DIR", help="the folder of a list's file names (default: the list's own)"
    )
    group.add_argument(
        "--num-images", type=int, metavar="N", help="use N of them, evenly spaced (default: at most 128)"
    )


def add_calibration(parser: ArgumentParser) -> None:
    add_images(parser)
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--calib",
        default="percentile",
        choices=RULES,
        help="the rule that turns a histogram into a range; auto takes the best for each tensor (default: %(default)s)",
    )
    add_percentile(group)
    group.add_argument(
        "--histograms", type=Path, metavar="NPZ", help="start from the histograms of an earlier run, without images"
    )
    add_input_check(group)


def add_input_check(parser: Any) -> None:
    parser.add_argument(
        "--no-input-check",
        dest="check_input",
        action="store_false",
        help="do not look first whether the model finds something on the images, or finds clearly more with other "
        "channels, another scale, resize or head than configured",
    )


def add_percentile(parser: Any) -> None:
    parser.add_argument(
        "--percentile",
        type=float,
        default=99.99,
        metavar="P",
        help="percent of the values inside the range, for --calib percentile (default: %(default)s)",
    )


def add_corrections(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--correct",
        type=corrections,
        metavar="auto|none|NAME,...",
        help=f"corrections that may be applied to the INT8 model: {', '.join(CORRECTIONS)}; none for the textbook form "
        "(default: auto, which is what --effort says)",
    )
    add_effort(parser)


def add_effort(parser: Any) -> None:
    said = "; ".join(f"{name}: {','.join(names)}" for name, names in EFFORTS.items())
    parser.add_argument(
        "--effort",
        choices=tuple(EFFORTS),
        help=f"what --correct auto stands for: {said}. thorough learns the whole network, which takes long, and "
        "goes on where it was stopped (default: default)",
    )


def add_int8_all(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--int8-all",
        action="store_true",
        help="INT8 for every convolution that can be, also where INT8 makes it no faster and FP16 is the default: "
        "depthwise convolutions, under 16 channels on a side, outputs of heads, and what memory bounds behind these",
    )


def add_int8_attention(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--int8-attention",
        action="store_true",
        help="INT8 for the products of two activations in attention as well, which builders then fuse less: in float "
        "they and the softmax between them are one kernel",
    )


def add_fp8(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="FP8 (E4M3) instead of INT8 for products of matrices, convolutions stay in INT8; TensorRT 10 and later, "
        "TensorRT-RTX, from compute capability 8.9 on; onnxruntime simulates it",
    )


def add_validation(parser: ArgumentParser, purpose: str, required: bool = False) -> None:
    group = parser.add_argument_group("annotated images")
    group.add_argument("--val-images", type=Path, metavar="DIR", required=required, help=f"a folder, {purpose}")
    group.add_argument(
        "--annotations", type=Path, metavar="JSON", required=required, help="the COCO instances file of --val-images"
    )


def add_ranking(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rank-images",
        type=int,
        default=32,
        metavar="N",
        help="rank the convolutions by their INT8 error on N images (default: %(default)s)",
    )
    add_ray(parser)


def add_dry_run(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would be done, what of it is there already, and about how long and how much memory it takes; "
        "checks all that needs no image, and computes and writes nothing",
    )


def add_ray(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--ray",
        metavar="ADDRESS|local",
        help="work on a Ray cluster, or on Ray workers of this machine (default: this process)",
    )


def add_nms(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("non-maximum suppression")
    group.add_argument(
        "--nms",
        default="auto",
        choices=NMS,
        help="where it runs: in the graph as TensorRT's plugin (efficient), as an ONNX operator (onnx) or as plain "
        "operators (native), or in whoever reads the outputs (host) (default: auto, which asks the backend)",
    )
    add_thresholds(group, None)
    group.add_argument(
        "--pre-nms-topk",
        type=int,
        metavar="N",
        help="candidates of an image, the best (default: the configuration's)",
    )


def add_thresholds(parser: Any, nargs: str | None) -> None:
    """The values of NMS that a sweep can vary; each defaults to the configuration's."""
    for name, kind, metavar, what in (
        ("score-threshold", float, "S", "a candidate's score must exceed this, 0 to 1"),
        ("iou-threshold", float, "IOU", "a better box of its class that overlaps more suppresses a box, 0 to 1"),
        ("max-detections", int, "N", "detections of an image at most"),
    ):
        parser.add_argument(
            f"--{name}",
            type=kind,
            nargs=nargs,
            default=[] if nargs else None,
            metavar=metavar,
            help=f"{what} (default: the configuration's)",
        )


def add_quantization(parser: ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--quantization", default="explicit", choices=("explicit", "implicit"), help=f"{what} (default: %(default)s)"
    )


def add_backend(parser: ArgumentParser) -> None:
    from trtdet.backends.libraries import LIBRARIES

    group = parser.add_argument_group("backend")
    group.add_argument(
        "--backend",
        default="auto",
        choices=("auto", *(library.name for library in LIBRARIES)),
        help="the library that builds the engine (default: auto, the first that works here)",
    )
    group.add_argument(
        "--sm",
        type=compute_capability,
        nargs="+",
        default=[],
        metavar="SM",
        help="compute capabilities to build for, such as 8.6 8.9, also written 86 89 (default: the backend's)",
    )
    group.add_argument(
        "--plugin-library",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="libraries of TensorRT plugins, for --silu plugin (default: none)",
    )


def add_runtime(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--runtime",
        default="auto",
        choices=RUNTIMES,
        help="what is run of a bundle: its engine where that is possible and else its ONNX model (auto), only the "
        "engine, or only the model with onnxruntime (default: %(default)s)",
    )
    add_renamed(parser, "--on", "--runtime", RUNTIMES)


def add_objective(parser: Any) -> None:
    parser.add_argument(
        "--objective",
        default="latency",
        choices=OBJECTIVES,
        help="what is cheap: milliseconds of a run, milliseconds an image at the largest batch, or bytes of weights "
        "(default: %(default)s)",
    )


def add_gpu(parser: Any) -> None:
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="estimate for this GPU, such as T4 or 'RTX 4090' (default: the first known GPU that the engine is built "
        "for, mostly L4)",
    )


def add_batch_range(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--batch",
        type=batch_range,
        metavar="MIN:OPT:MAX",
        help="batch sizes of a model that leaves it open; a single number fixes it (default: 1)",
    )


def batch_range(text: str) -> tuple[int, int, int]:
    """``4`` -> (4, 4, 4) and ``1:4:8`` -> (1, 4, 8)."""
    try:
        sizes = [int(part) for part in text.split(":")]
    except ValueError:
        sizes = []
    if len(sizes) == 1:
        sizes *= 3
    if len(sizes) != 3 or not 0 < sizes[0] <= sizes[1] <= sizes[2]:
        raise argparse.ArgumentTypeError(f"'{text}' must be MIN:OPT:MAX with 0 < MIN <= OPT <= MAX, or one number")
    return sizes[0], sizes[1], sizes[2]


def size(text: str) -> tuple[int, int]:
    """``480x640`` -> (480, 640), height and width; ``640`` -> (640, 640)."""
    sides = [int(part) for part in text.split("x")] if re.fullmatch(r"[0-9]{1,6}(x[0-9]{1,6})?", text) else []
    if not sides or not all(sides):
        raise argparse.ArgumentTypeError(f"'{text}' must be HEIGHTxWIDTH in pixels, such as 480x640, or one number")
    return sides[0], sides[-1]


def add_batch(parser: ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument(
        "--batch",
        type=int,
        nargs=nargs,
        default=[] if nargs else None,
        metavar="N",
        help="images at once (default: the fixed batch size, or 1)",
    )


def compute_capability(text: str) -> int:
    """``8.6`` and ``86`` -> 86."""
    if re.fullmatch(r"[0-9]{1,2}\.[0-9]", text):
        return int(text.replace(".", ""))
    if re.fullmatch(r"[0-9]{2,3}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' must be a compute capability, such as 8.6 or 86")


def corrections(text: str) -> tuple[str, ...] | None:
    """``none`` or names -> those names, in the order in which corrections are applied; ``auto`` -> None."""
    if text in ("auto", "none"):
        return None if text == "auto" else ()
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in CORRECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no correction '{unknown[0]}'; allowed: auto, none, or some of {','.join(CORRECTIONS)}"
        )
    return tuple(name for name in CORRECTIONS if name in names)


def chosen_corrections(given: Sequence[tuple[str, ...] | None], effort: str | None) -> tuple[tuple[str, ...], ...]:
    """The different sets of corrections that ``--correct`` and ``--effort`` come to.

    Args:
        given: each as :func:`corrections` reads it; None for ``auto``.
        effort: that was given, if any.

    Raises:
        ConfigError: an effort, and no ``auto`` that it says anything of.
    """
    if effort is not None and None not in given:
        raise ConfigError(
            f"--effort {effort} says what --correct auto stands for, and --correct names other corrections; leave out "
            "the one or the other"
        )
    return tuple(dict.fromkeys(EFFORTS[effort or "default"] if names is None else names for names in given))


def config_of(options: argparse.Namespace) -> Config:
    """The configuration with the NMS values that were given."""
    from trtdet.config import load_config

    return load_config(options.config).with_nms(**nms_changes(options))


def config_if_given(options: argparse.Namespace) -> Config | None:
    """The configuration of a model; None for a bundle, which carries its own."""
    return config_of(options) if options.config else None


def nms_changes(options: argparse.Namespace) -> dict[str, Any]:
    """The NMS values of the command line by key of the configuration; None where none was given."""
    keys = ("score_threshold", "iou_threshold", "max_detections", "pre_nms_topk")
    return {key: getattr(options, key, None) for key in keys}


def calibration_of(options: argparse.Namespace) -> CalibrationOptions:
    from trtdet.pipeline import CalibrationOptions

    return CalibrationOptions(
        options.calib,
        options.percentile,
        options.images,
        options.images_root,
        options.num_images,
        options.histograms,
        options.check_input,
    )


def check_suffix(output: Path | None, *allowed: str) -> None:
    """Refuses a name that says nothing of what is written, before anything is measured."""
    if output is not None and output.suffix not in allowed:
        raise ConfigError(f"-o {output} must end in {' or '.join(allowed)}")
