"""``trtdet calibrate``: ranges of activations."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import (
    add_calibration,
    add_int8_attention,
    add_model,
    add_output,
    add_quantization,
    calibration_of,
    config_of,
)
from trtdet.errors import ConfigError
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    add_model(parser)
    add_output(parser, "ranges.json", "where the ranges are written; the histograms and TensorRT's cache get its name")
    add_calibration(parser)
    add_int8_attention(parser)
    add_quantization(parser, "ranges of what Q/DQ nodes read, or of every tensor that TensorRT may quantise by itself")
    parser.add_argument(
        "--tensorrt",
        default="8.6.0",
        metavar="VERSION",
        help="the TensorRT version that is to read the calibration cache (default: %(default)s)",
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    import resource
    import time

    from trtdet.calibration.cache import version_number
    from trtdet.files import prepare_target, write_atomically
    from trtdet.pipeline import calibrate

    if options.output.suffix in (".npz", ".cache"):
        raise ConfigError(f"-o {options.output} names the ranges; the histograms and the cache are written beside it")
    prepare_target(options.output)
    started = time.perf_counter()
    version = version_number(options.tensorrt)
    done = calibrate(
        options.model,
        config_of(options),
        calibration_of(options),
        console.progress,
        options.quantization,
        options.int8_attention,
    )
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
    source = f"from {histograms}" if done.reused else f"{done.collection.images} images"
    console.say(f"{tensors} ranges by {done.ranges.rule}, {source}, {seconds:.1f} s, peak memory {peak:.0f} MB")
    console.say(f"wrote {', '.join(map(str, written))}")
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
        "input_check": done.seen.as_dict() if done.seen is not None else None,
    }


COMMAND = Command("calibrate", "the range of every activation, from images", _options, _run)
