"""The command line: arguments in, one call, what it gave printed. Nothing is decided here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet import __version__
from trtdet.errors import ConfigError, TrtdetError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.audit import Audit
    from trtdet.bundle import Bundle, SiluPart
    from trtdet.config import Config
    from trtdet.pipeline import CalibrationOptions

RULES = ("minmax", "entropy", "percentile", "mse", "auto")
CORRECTIONS = ("smooth", "shift", "round", "bias")
SILU = ("auto", "keep", "swish", "plugin")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 when done, 1 on a TrtdetError; wrong usage exits with 2, Ctrl-C with 130.
    """
    options = _parser().parse_args(arguments)
    with Console() as console:
        try:
            result: dict[str, Any] = options.run(options, console)
        except TrtdetError as error:
            if options.json:
                print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
            console.line(f"trtdet: error: {error}")
            return 1
        except KeyboardInterrupt:
            console.line("trtdet: stopped; nothing was left half-written")
            return 130
        except BrokenPipeError:
            return 1
    if options.json:
        print(json.dumps(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trtdet", description="A trained detector becomes an INT8 TensorRT engine, and COCO mAP says what it cost."
    )
    parser.add_argument("--version", action="version", version=f"trtdet {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    _command(commands, "doctor", _doctor, "what works on this machine, and the pip line for the rest")

    export = _command(commands, "export", _export, "torch to ONNX, checked against torch")
    export.add_argument("source", metavar="SOURCE", help="yolox-nano|tiny|s|m|l|x, shapes, or package.module:factory")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="model.onnx")
    export.add_argument("--weights", type=Path, help="a checkpoint; loaded weights-only, no code of it is run")
    export.add_argument("--config", help="YAML file or shipped name; needed for package.module:factory")
    export.add_argument("--dynamic-batch", action="store_true", help="leave the batch size open")
    export.add_argument("--opset", type=int, default=17)
    export.add_argument(
        "--tolerance", type=float, default=1e-3, help="largest error against torch (default: %(default)s)"
    )

    calibrate = _command(commands, "calibrate", _calibrate, "the range of every activation, from images")
    calibrate.add_argument("model", type=Path, metavar="MODEL")
    calibrate.add_argument("-o", "--output", type=Path, required=True, metavar="ranges.json")
    _model_options(calibrate)
    _calibration_options(calibrate)
    _quantization_option(calibrate, "what Q/DQ nodes read, or every tensor that TensorRT may quantise by itself")
    calibrate.add_argument("--tensorrt", default="8.6.0", metavar="VERSION", help="reads the cache (default: 8.6.0)")

    build = _command(commands, "build", _build, "a bundle with an engine, from a float ONNX model")
    build.add_argument("model", type=Path, metavar="MODEL")
    build.add_argument("-o", "--output", type=Path, required=True, metavar="BUNDLE")
    precision = build.add_mutually_exclusive_group()
    for name in ("int8", "fp16", "fp32"):
        precision.add_argument(f"--{name}", dest="precision", action="store_const", const=name)
    build.set_defaults(precision="int8")
    _model_options(build)
    _calibration_options(build)
    _correction_options(build)
    keep = build.add_mutually_exclusive_group()
    keep.add_argument(
        "--keep-fp16",
        type=_keep,
        metavar="N|PLAN.json|NODE,...",
        help="in FP16: the N most sensitive convolutions, those of an edited plan, or these; 'depthwise' is all such",
    )
    keep.add_argument(
        "--fp16-budget", type=float, metavar="SHARE", help="in FP16: the most sensitive for this share of multiply-adds"
    )
    keep.add_argument(
        "--max-map-drop", type=float, metavar="X", help="in FP16: the smallest set that loses at most X mAP points"
    )
    _validation_options(build, "for --max-map-drop")
    _ranking_options(build)
    _nms_options(build)
    build.add_argument("--silu", default="auto", choices=SILU, help="what SiLU and HardSwish become (default: auto)")
    _quantization_option(build, "Q/DQ nodes in the model, or a float model and a calibrator for TensorRT up to 10")
    build.add_argument(
        "--calibrator",
        default="trtdet",
        choices=("trtdet", "tensorrt"),
        help="whose ranges implicit quantisation takes: trtdet's, or those of TensorRT's own calibrator of --calib",
    )
    build.add_argument(
        "--calibration-cache",
        type=Path,
        metavar="FILE",
        help="implicit quantisation with these ranges",
    )
    _backend_options(build)
    _engine_options(build)
    build.add_argument(
        "--no-measure", action="store_true", help="do not measure, after the build, what INT8 cost and brought"
    )
    build.add_argument(
        "--batch", type=_batch, metavar="MIN:OPT:MAX", help="images at once; one number for a fixed batch"
    )

    sensitivity = _command(commands, "sensitivity", _sensitivity, "what INT8 costs at each convolution, ranked")
    sensitivity.add_argument("model", type=Path, metavar="MODEL")
    sensitivity.add_argument("-o", "--output", type=Path, required=True, metavar="sensitivity.json")
    _model_options(sensitivity)
    _calibration_options(sensitivity)
    _correction_options(sensitivity)
    _validation_options(sensitivity, "to measure mAP as well, on these images")
    _ranking_options(sensitivity)
    sensitivity.add_argument(
        "--method",
        default="fast",
        choices=("fast", "reference"),
        help="fast leaves out images with few detections (default: fast)",
    )
    sensitivity.add_argument(
        "--all-but-one", action="store_true", help="all convolutions in INT8 but each in turn, not each alone"
    )

    sweep = _command(commands, "sweep", _sweep, "the matrix of variants, built and scored, one row each")
    sweep.add_argument("model", type=Path, metavar="MODEL")
    sweep.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    _model_options(sweep)
    _image_options(sweep)
    sweep.add_argument("--calib", nargs="+", default=["percentile"], choices=RULES, help="default: percentile")
    sweep.add_argument("--percentile", type=float, default=99.99, help="default: %(default)s")
    sweep.add_argument(
        "--correct",
        nargs="+",
        type=_corrections,
        default=[CORRECTIONS],
        metavar="auto|none|NAME,...",
        help="sets of them",
    )
    sweep.add_argument(
        "--keep-fp16",
        nargs="+",
        type=_kept,
        default=[0],
        metavar="N|depthwise",
        help="convolutions in FP16 (default: 0)",
    )
    for name, kind in (("score-threshold", float), ("iou-threshold", float), ("max-detections", int)):
        sweep.add_argument(f"--{name}", nargs="+", type=kind, default=[], help="default: the configuration's")
    sweep.add_argument("--silu", nargs="+", default=["auto"], choices=SILU, help="forms of SiLU (default: auto)")
    _validation_options(sweep, "to score on", required=True)
    _backend_options(sweep)
    _on_option(sweep)
    _ray_option(sweep)

    evaluate = _command(commands, "eval", _eval, "COCO mAP of a bundle or a model")
    evaluate.add_argument("target", type=Path, metavar="BUNDLE|MODEL")
    evaluate.add_argument("--images", type=Path, required=True, metavar="DIR")
    evaluate.add_argument("--annotations", type=Path, required=True, metavar="JSON")
    evaluate.add_argument("--config", help="YAML file or shipped name; needed for a MODEL")
    evaluate.add_argument(
        "--against", type=Path, metavar="BUNDLE|MODEL", help="what to compare with; a MODEL is read as the target is"
    )
    evaluate.add_argument(
        "--resamples", type=int, default=1000, metavar="N", help="of the images, for --against (default: %(default)s)"
    )
    _nms_options(evaluate)
    _on_option(evaluate)

    audit = _command(commands, "audit", _audit, "what precision each convolution got, and what got in the way")
    audit.add_argument("bundle", type=Path, metavar="BUNDLE")
    audit.add_argument("--all", action="store_true", help="every finding, not the costliest three of each kind")
    audit.add_argument(
        "--times",
        type=Path,
        metavar="JSON",
        help="measured times of its layers, as trtexec --exportProfile writes them",
    )

    audit.add_argument("--measure", action="store_true", help="measure these times here, where the engine can run")
    audit.add_argument("--compare", action="store_true", help="name the first layer that departs from onnxruntime")
    audit.add_argument("--images", type=Path, metavar="DIR|LIST", help="what is run for --compare")
    audit.add_argument("--num-images", type=int, default=4, metavar="N", help="of them (default: %(default)s)")
    audit.add_argument("--limit", type=float, metavar="DB", help="least signal-to-noise ratio (default: by precision)")

    infer = _command(commands, "infer", _infer, "pictures with boxes, and JSON")
    infer.add_argument("target", type=Path, metavar="BUNDLE|MODEL")
    infer.add_argument("images", type=Path, nargs="+", metavar="IMAGE")
    infer.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    infer.add_argument("--config", help="YAML file or shipped name; needed for a MODEL")
    infer.add_argument("--score-threshold", type=float, default=0.3, help="default: %(default)s")
    _on_option(infer)

    record = _command(
        commands, "record", _record, "a bundle's raw outputs, to be replayed in C++ where there is no GPU"
    )
    record.add_argument("bundle", type=Path, metavar="BUNDLE")
    record.add_argument("--images", type=Path, required=True, metavar="DIR|LIST")
    record.add_argument("--num-images", type=int, metavar="N", help="this many, evenly spaced (default: all)")
    record.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    _on_option(record)

    bench = _command(commands, "bench", _bench, "latency and throughput, of several targets side by side")
    bench.add_argument("targets", type=Path, nargs="+", metavar="BUNDLE|MODEL")
    bench.add_argument("--config", help="YAML file or shipped name; needed for a MODEL")
    bench.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="images at once (default: the fixed batch, else 1)",
    )
    bench.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="execution contexts that run side by side (default: 1)",
    )
    bench.add_argument("--seconds", type=float, default=3.0, help="of each target at each point (default: %(default)s)")
    bench.add_argument("--warm-up", type=float, default=1.0, help="seconds, or until steady (default: %(default)s)")
    bench.add_argument("--min-runs", type=int, default=50, metavar="N", help="of each point (default: %(default)s)")
    bench.add_argument(
        "--baseline", type=Path, metavar="BUNDLE|MODEL", help="what the others are compared with (default: the first)"
    )
    bench.add_argument("--no-transfers", action="store_true", help="leave the copies to and from the device out")
    bench.add_argument("--images", type=Path, metavar="DIR|LIST", help="what to run (default: noise)")
    bench.add_argument("-o", "--output", type=Path, metavar="bench.json")

    profile = _command(commands, "profile", _profile, "time by kind of operator and by layer")
    profile.add_argument("target", type=Path, metavar="BUNDLE|MODEL")
    profile.add_argument("--config", help="YAML file or shipped name; needed for a MODEL")
    profile.add_argument("--batch", type=int, metavar="N", help="images at once (default: the fixed batch, else 1)")
    profile.add_argument("--runs", type=int, default=50, metavar="N", help="default: %(default)s")
    profile.add_argument("--warm-up", type=int, default=5, metavar="N", help="runs before them (default: %(default)s)")
    profile.add_argument("--images", type=Path, metavar="DIR|LIST", help="what to run (default: noise)")
    profile.add_argument(
        "--against", type=Path, metavar="BUNDLE|MODEL", help="which layers are slower than in this one"
    )
    profile.add_argument("--top", type=int, default=20, metavar="N", help="layers to list (default: %(default)s)")
    profile.add_argument("-o", "--output", type=Path, metavar="profile.json|profile.html")

    package = _command(commands, "package", _package, "a bundle for Triton Inference Server or for DeepStream")
    package.add_argument("bundle", type=Path, metavar="BUNDLE")
    package.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    package.add_argument("--format", required=True, choices=("triton", "deepstream"))
    package.add_argument("--name", help="of the served model (default: of the bundle's configuration)")
    package.add_argument(
        "--input", choices=("encoded", "pixels"), help="Triton: image files or RGB pixels (default: encoded)"
    )
    package.add_argument(
        "--queue-delay", type=int, metavar="US", help="Triton: microseconds that a batch waits (default: 500)"
    )
    package.add_argument(
        "--cpu-instances", type=int, metavar="N", help="Triton: processes before and after the engine (default: 2)"
    )

    demo = _command(commands, "demo", _demo, "the whole way on the shipped detector and generated images")
    demo.add_argument("-o", "--output", type=Path, default=Path("demo"), metavar="DIR", help="default: %(default)s")
    return parser


def _command(commands: Any, name: str, run: Any, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=help_text)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="YAML file or shipped name such as yolox")


def _backend_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", default="auto", choices=("auto", "tensorrt", "tensorrt-rtx", "onnxruntime"), help="default: auto"
    )
    parser.add_argument(
        "--sm", type=int, nargs="+", default=[], metavar="SM", help="compute capabilities, such as 86 89"
    )
    parser.add_argument(
        "--plugin-library", type=Path, nargs="+", default=[], metavar="PATH", help="TensorRT plugins, for --silu plugin"
    )


def _quantization_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--quantization", default="explicit", choices=("explicit", "implicit"), help=f"{what} (default: explicit)"
    )


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workspace", type=float, metavar="MIB", help="scratch memory that a kernel may use")
    parser.add_argument("--version-compatible", action="store_true", help="for later TensorRT versions as well")
    parser.add_argument("--hardware-compatible", action="store_true", help="for every GPU since Ampere")
    parser.add_argument("--embed-plugins", action="store_true", help="the engine carries the plugin libraries")
    parser.add_argument("--tactic-sources", nargs="*", metavar="NAME", help="kernel libraries that TensorRT may use")
    parser.add_argument(
        "--timing-cache", type=Path, metavar="FILE", help="what is known of the device's kernels (default: beside -o)"
    )


def _image_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--images", type=Path, metavar="DIR|LIST", help="calibration images: a folder or a list of names"
    )
    parser.add_argument("--images-root", type=Path, metavar="DIR", help="the folder that a list's names are in")
    parser.add_argument("--num-images", type=int, metavar="N", help="so many, evenly spaced (default: at most 128)")


def _calibration_options(parser: argparse.ArgumentParser) -> None:
    _image_options(parser)
    parser.add_argument("--calib", default="percentile", choices=RULES, help="default: %(default)s")
    parser.add_argument("--percentile", type=float, default=99.99, help="default: %(default)s")
    parser.add_argument("--histograms", type=Path, metavar="NPZ", help="start from these instead of running the images")


def _correction_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--correct",
        type=_corrections,
        default=CORRECTIONS,
        metavar="auto|none|NAME,...",
        help=f"what may be corrected: {', '.join(CORRECTIONS)}; none for the textbook form (default: auto, all)",
    )


def _validation_options(parser: argparse.ArgumentParser, purpose: str, required: bool = False) -> None:
    parser.add_argument(
        "--val-images", type=Path, metavar="DIR", required=required, help=f"annotated images, {purpose}"
    )
    parser.add_argument("--annotations", type=Path, metavar="JSON", required=required, help="their COCO instances file")


def _ranking_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rank-images", type=int, default=32, metavar="N", help="images to rank convolutions on (default: %(default)s)"
    )
    _ray_option(parser)


def _ray_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ray", metavar="ADDRESS|local", help="work on a Ray cluster, or on Ray workers here")


def _nms_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nms",
        default="auto",
        choices=("auto", "efficient", "onnx", "native", "host"),
        help="what suppresses: a plugin, one operator or plain operators in the graph, or its reader (default: auto)",
    )
    parser.add_argument("--score-threshold", type=float)
    parser.add_argument("--iou-threshold", type=float)
    parser.add_argument("--max-detections", type=int)
    parser.add_argument("--pre-nms-topk", type=int)


def _on_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        default="auto",
        choices=("auto", "engine", "onnxruntime"),
        help="what is run: the engine where that can be, only the engine, or its ONNX model (default: auto)",
    )


def _batch(text: str) -> tuple[int, int, int]:
    try:
        sizes = [int(part) for part in text.split(":")]
    except ValueError:
        sizes = []
    if len(sizes) == 1:
        sizes *= 3
    if len(sizes) != 3 or not 0 < sizes[0] <= sizes[1] <= sizes[2]:
        raise argparse.ArgumentTypeError(f"'{text}' must be MIN:OPT:MAX with 0 < MIN <= OPT <= MAX, or one number")
    return sizes[0], sizes[1], sizes[2]


def _corrections(text: str) -> tuple[str, ...]:
    if text in ("auto", "none"):
        return CORRECTIONS if text == "auto" else ()
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in CORRECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no correction '{unknown[0]}'; allowed: auto, none, or some of {','.join(CORRECTIONS)}"
        )
    return tuple(name for name in CORRECTIONS if name in names)


def _keep(text: str) -> int | Path | tuple[str, ...]:
    if text.isdigit():
        return int(text)
    if text.endswith(".json"):
        return Path(text)
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"'{text}' must be a number, a plan (.json), or names parted by commas")
    return names


def _kept(text: str) -> int | str:
    if text.isdigit() or text == "depthwise":
        return int(text) if text.isdigit() else text
    raise argparse.ArgumentTypeError(f"'{text}' must be a number of convolutions, or 'depthwise'")


def _config(options: argparse.Namespace) -> Config:
    from trtdet.config import load_config

    return load_config(options.config).with_nms(**_nms_changes(options))


def _nms_changes(options: argparse.Namespace) -> dict[str, Any]:
    keys = ("score_threshold", "iou_threshold", "max_detections", "pre_nms_topk")
    return {key: getattr(options, key, None) for key in keys}


def _calibration(options: argparse.Namespace) -> CalibrationOptions:
    from trtdet.pipeline import CalibrationOptions

    return CalibrationOptions(
        options.calib,
        options.percentile,
        options.images,
        options.images_root,
        options.num_images,
        options.histograms,
    )


def _say(options: argparse.Namespace, text: str) -> None:
    print(text, file=sys.stderr if options.json else sys.stdout)


def _doctor(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.backends.doctor import diagnose

    found = diagnose()
    devices = ", ".join(found.devices) or "none: engines are built ahead of time with TensorRT-RTX"
    _say(options, f"trtdet {found.trtdet}, Python {found.python}\nCUDA devices: {devices}\nCUDA driver: {found.driver}")
    for title, checks in (("backends", found.backends), ("extras", found.extras)):
        _say(options, f"{title}:")
        for check in checks:
            mark = "ok     " if check.ok else "missing"
            _say(options, f"  {mark} {check.name:13} {check.detail}" + (f"  ->  {check.fix}" if check.fix else ""))
    return found.as_dict()


def _export(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from dataclasses import asdict

    from trtdet.config import load_config
    from trtdet.exporter import ExportOptions, export

    report = export(
        options.source,
        options.output,
        ExportOptions(
            weights=options.weights,
            config=load_config(options.config) if options.config else None,
            dynamic_batch=options.dynamic_batch,
            opset=options.opset,
            tolerance=options.tolerance,
        ),
    )
    for output in report.outputs:
        shape = "x".join(map(str, output.shape))
        _say(
            options,
            f"{output.name} {shape}: largest error against torch {output.max_abs:.2e}, mean {output.mean_abs:.2e}",
        )
    _say(options, f"wrote {report.path}")
    result: dict[str, Any] = json.loads(json.dumps(asdict(report), default=str))
    return result


def _calibrate(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    import resource
    import time

    from trtdet.calibration.cache import version_number
    from trtdet.files import write_atomically, writing
    from trtdet.pipeline import calibrate

    if options.output.suffix in (".npz", ".cache"):
        raise ConfigError(f"-o {options.output} names the ranges; the histograms and the cache are written beside it")
    with writing(options.output):
        options.output.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    version = version_number(options.tensorrt)
    done = calibrate(options.model, _config(options), _calibration(options), console.progress, options.quantization)
    histograms = options.histograms or options.output.with_suffix(".npz")
    cache = options.output.with_suffix(".cache")
    written = [options.output, cache] if done.reused else [options.output, histograms, cache]
    if not done.reused:
        done.collection.save(histograms)
    write_atomically(cache, done.ranges.to_calibration_cache(version).encode())
    done.ranges.save(options.output)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tensors = len(done.ranges.tensors)
    how = f"from {histograms}" if done.reused else f"{done.collection.images} images"
    _say(options, f"{tensors} ranges by {done.ranges.rule}, {how}, {seconds:.1f} s, peak memory {peak:.0f} MB")
    _say(options, f"wrote {', '.join(map(str, written))}")
    return {
        "images": done.collection.images,
        "skipped": list(done.collection.skipped),
        "tensors": tensors,
        "rule": done.ranges.rule,
        "reused": done.reused,
        "seconds": round(seconds, 3),
        "peak_rss_mb": round(peak, 1),
        "ranges": str(options.output),
        "histograms": str(histograms),
        "calibration_cache": str(cache),
    }


def _build(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.backends import EngineOptions
    from trtdet.pipeline import BuildOptions, KeepOptions, build
    from trtdet.pipeline.verdict import weigh

    config = _config(options)
    asked = BuildOptions(
        options.precision,
        _calibration(options),
        options.correct,
        options.nms,
        options.backend,
        tuple(options.sm),
        options.batch,
        KeepOptions(
            options.keep_fp16,
            options.fp16_budget,
            options.max_map_drop,
            options.val_images,
            options.annotations,
            options.rank_images,
            options.ray,
        ),
        silu=options.silu,
        plugins=tuple(options.plugin_library),
        quantization=options.quantization,
        calibrator=options.calibrator,
        cache=options.calibration_cache,
        engine=EngineOptions(
            None if options.workspace is None else int(options.workspace * 2**20),
            options.version_compatible,
            options.hardware_compatible,
            options.embed_plugins,
            None if options.tactic_sources is None else tuple(options.tactic_sources),
        ),
        timing_cache=options.timing_cache,
    )
    result = build(options.model, config, options.output, asked, console.progress)
    manifest = result.bundle.manifest
    if result.audit is not None:
        _say_audit(options, result.audit)
    if manifest.quantization.corrections:
        _say(options, f"corrected: {'; '.join(manifest.quantization.corrections)}")
    if result.trade_off is not None:
        _say(options, result.trade_off.table())
        _say(options, f"{result.trade_off.evaluations} scores; FP32 mAP {100 * result.trade_off.reference:.2f}")
    worth = None
    if options.precision == "int8" and not options.no_measure and not result.up_to_date:
        worth = weigh(options.model, config, result.bundle, asked, progress=console.progress)
    if worth is not None:
        _say(options, str(worth))
    _say(options, _summary(result.bundle, options, result.up_to_date))
    return {
        "bundle": str(result.bundle.path),
        "up_to_date": result.up_to_date,
        "manifest": json.loads(result.bundle.manifest.to_json()),
        "worth": worth.as_dict() if worth is not None else None,
        "trade_off": result.trade_off.as_dict() if result.trade_off else None,
    }


def _summary(bundle: Bundle, options: argparse.Namespace, up_to_date: bool) -> str:
    """The last line: what was asked for and what was done."""
    manifest = bundle.manifest
    counts = manifest.audit or manifest.precision
    engine = bundle.engine
    known = "as built" if manifest.audit else "as planned, not audited"
    done = f"{counts.int8} convs INT8, {counts.fp16} FP16, {counts.fp32} FP32 {known}"
    made = f"engine {engine.stat().st_size / 1e6:.1f} MB" if engine else "no engine (onnxruntime runs the model itself)"
    target = f"{manifest.backend.name} {manifest.backend.version}"
    if manifest.backend.sms:
        target += f" for compute capability {', '.join(str(sm / 10) for sm in manifest.backend.sms)}"
    state = "up to date" if up_to_date else "wrote"
    asked = f"asked --backend {options.backend} --nms {options.nms} --silu {options.silu} --{options.precision}"
    if manifest.quantization.mode == "implicit":
        whose = {"trtdet": "trtdet's ranges", "tensorrt": "TensorRT's calibrator", "cache": "the ranges of a cache"}
        done = f"quantised by TensorRT with {whose[manifest.quantization.source]}: {done}"
    silu = _silu(manifest.silu)
    return f"{state} {bundle.path}: {made}, {target}, NMS {manifest.nms.where}, {silu}, {done} ({asked})"


def _silu(part: SiluPart | None) -> str:
    if part is None:
        return "SiLU as it was"
    flow = f", {part.read_int8} read and {part.write_int8} write INT8" if part.done == "plugin" else ""
    return f"SiLU {part.done} ({part.rewritten} rewritten{flow})"


def _sensitivity(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.files import writing
    from trtdet.pipeline import SensitivityOptions, sensitivity

    if options.output.suffix != ".json":
        raise ConfigError(f"-o {options.output} must end in .json: rows are appended to a .jsonl file beside it")
    with writing(options.output):
        options.output.parent.mkdir(parents=True, exist_ok=True)
    rows = options.output.with_suffix(".jsonl")
    found = sensitivity(
        options.model,
        _config(options),
        SensitivityOptions(
            _calibration(options),
            options.correct,
            options.rank_images,
            options.method,
            "int8" if options.all_but_one else "fp32",
            options.val_images,
            options.annotations,
            options.ray,
        ),
        rows,
        console.progress,
    )
    found.save(options.output)
    _say(options, found.table())
    _say(options, f"{found.inferences} model runs, {found.seconds:.1f} s; wrote {options.output}, {rows}")
    return found.as_dict()


def _sweep(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    import itertools

    from trtdet.config import load_config
    from trtdet.pipeline import CalibrationOptions
    from trtdet.pipeline.variants import SweepOptions, sweep

    config = load_config(options.config)
    axes = {key: getattr(options, key) for key in ("score_threshold", "iou_threshold", "max_detections")}
    named = {key: values for key, values in axes.items() if values}
    suppressions = [
        config.with_nms(**dict(zip(named, values, strict=True))).nms for values in itertools.product(*named.values())
    ]
    done = sweep(
        options.model,
        config,
        options.output,
        SweepOptions(
            CalibrationOptions(
                options.calib[0], options.percentile, options.images, options.images_root, options.num_images
            ),
            options.val_images,
            options.annotations,
            tuple(dict.fromkeys(options.calib)),
            tuple(dict.fromkeys(options.correct)),
            tuple(dict.fromkeys(options.keep_fp16)),
            tuple(suppressions),
            options.backend,
            tuple(options.sm),
            options.ray,
            tuple(options.silu),
            tuple(options.plugin_library),
            options.on,
        ),
        console.progress,
    )
    _say(options, done.table())
    _say(options, f"{len(done.rows)} rows; wrote {done.folder}")
    return done.as_dict()


def _eval(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import CocoDataset
    from trtdet.evaluation.comparison import Bootstrap, compare, open_pair
    from trtdet.evaluation.scoring import Evaluation, evaluate
    from trtdet.runtime.detector import Detector

    def scored(stage: str, detector: Detector) -> Evaluation:
        dataset = CocoDataset.load(options.annotations, options.images, detector.classes)
        return evaluate(detector, dataset, lambda count, total: console.progress(stage, count, total))

    config = _config(options) if options.config else None
    if config is None and any(value is not None for value in _nms_changes(options).values()):
        raise ConfigError("a bundle's NMS thresholds were chosen when it was built; build it again with others")
    bootstrap, reference = Bootstrap(options.resamples), None
    if options.against:
        detector, reference = open_pair(options.target, options.against, config, options.nms, options.on)
    else:
        detector = Detector.open(options.target, config, options.nms, options.on)
    done = scored("evaluating", detector)
    _say(options, str(done.result))
    _say(
        options,
        f"{done.result.images} images, {done.result.detections} detections, {done.ms_per_image:.1f} ms an image; "
        f"{done.file} on {done.run_info}, NMS {done.nms}",
    )
    if reference is None:
        return done.as_dict()
    comparison = compare(
        done,
        scored("evaluating the reference", reference),
        bootstrap,
        lambda count, total: console.progress("resampling", count, total),
    )
    _say(options, str(comparison))
    return {**done.as_dict(), "against": comparison.as_dict()}


def _audit(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.audit import Audit, load_times
    from trtdet.audit.agreement import compare_layers
    from trtdet.bundle import Bundle
    from trtdet.performance.layers import layer_means

    if options.compare != (options.images is not None):
        raise ConfigError("--compare and --images belong together: give both")
    if options.measure and options.times is not None:
        raise ConfigError("--measure and --times both say how long layers take: give one of them")
    bundle = Bundle(options.bundle)
    found = Audit.load(bundle.file("audit.json"))
    if options.times is not None:
        found = found.timed(load_times(options.times))
    elif options.measure:
        found = found.timed(layer_means(options.bundle, console.progress))
    _say(options, f"{found.summary}\n{found.report(options.all)}")
    if not options.compare:
        return found.as_dict()
    agreed = compare_layers(bundle, options.images, options.num_images, options.limit, console.progress)
    _say(options, f"{agreed.table()}\n{agreed}")
    return {**found.as_dict(), "compare": agreed.as_dict()}


def _say_audit(options: argparse.Namespace, found: Audit) -> None:
    _say(options, found.summary)
    if found.advice:
        _say(options, f"to try, of {len(found.advice)} that 'trtdet audit' lists: {found.advice[0]}")


def _infer(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.pictures import infer

    detector = Detector.open(options.target, _config(options) if options.config else None, on=options.on)
    done = infer(
        detector,
        options.images,
        options.output,
        score_threshold=options.score_threshold,
        progress=lambda count, total: console.progress("detecting", count, total),
    )
    total = sum(len(row["detections"]) for row in done.detections)
    ran_on = str(detector.runner.run_info)
    _say(options, f"{total} detections in {len(done.pictures)} images on {ran_on}; wrote {done.folder}, {done.json}")
    return {"folder": str(done.folder), "images": list(done.detections), "ran_on": ran_on}


def _record(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import evenly, find_images
    from trtdet.runtime.recordings import record

    images = find_images(options.images)
    if options.num_images is not None:
        images = evenly(images, options.num_images)
    done = record(options.bundle, images, options.output, on=options.on, progress=console.progress)
    _say(options, f"{done.images} images on {done.run_info}; wrote {done.file}, {done.size / 1e6:.1f} MB")
    return {"recording": str(done.file), "images": done.images, "bytes": done.size, "ran_on": str(done.run_info)}


def _bench(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.performance.latency import BenchOptions, bench

    _check_suffix(options.output, ".json")
    done = bench(
        options.targets,
        _config(options) if options.config else None,
        BenchOptions(
            tuple(options.batch),
            tuple(options.streams),
            options.seconds,
            options.warm_up,
            options.min_runs,
            not options.no_transfers,
            options.images,
        ),
        options.baseline,
        console.progress,
    )
    _say(options, done.table())
    result = done.as_dict()
    _finish(options, console, done.warnings, json.dumps(result, indent=1))
    return result


def _profile(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.performance.layers import ProfileOptions, profile

    _check_suffix(options.output, ".json", ".html")
    done = profile(
        options.target,
        _config(options) if options.config else None,
        ProfileOptions(options.batch, options.runs, options.warm_up, options.images),
        options.against,
        console.progress,
    )
    _say(options, done.table(options.top))
    result, page = done.as_dict(), options.output is not None and options.output.suffix == ".html"
    _finish(options, console, done.warnings, done.html(options.top) if page else json.dumps(result, indent=1))
    return result


def _check_suffix(output: Path | None, *allowed: str) -> None:
    """Before anything is measured."""
    if output is not None and output.suffix not in allowed:
        raise ConfigError(f"-o {output} must end in {' or '.join(allowed)}")


def _finish(options: argparse.Namespace, console: Console, warnings: Sequence[str], text: str) -> None:
    """Says what to know before a measurement is believed, and writes it where it is wanted."""
    from trtdet.files import write_atomically

    for warning in warnings:
        console.line(f"warning: {warning}")
    if options.output is not None:
        write_atomically(options.output, (text + "\n").encode())
        _say(options, f"wrote {options.output}")


def _package(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.deploy import PackageOptions, TritonOptions, package

    asked = {"input": options.input, "queue_delay_us": options.queue_delay, "cpu_instances": options.cpu_instances}
    given = {key: value for key, value in asked.items() if value is not None}
    triton = TritonOptions(**given) if given else None
    done = package(options.bundle, options.output, PackageOptions(options.format, options.name, triton))
    _say(options, f"wrote {done.folder}: {len(done.files)} files for {done.format}; its README.md says how to start it")
    for warning in done.warnings:
        console.line(f"warning: {warning}")
    return done.as_dict()


def _demo(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from trtdet.demo.walkthrough import run_demo

    done = run_demo(options.output, console.progress)
    _say(options, done.table())
    return done.as_dict()


if __name__ == "__main__":
    sys.exit(main())
