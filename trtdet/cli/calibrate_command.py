"""``trtdet calibrate``: ranges of activations."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import model_options, options_of
from trtdet.errors import ConfigError
from trtdet.options import CalibrateOptions
from trtdet.progress import Console


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    import resource
    import time

    from trtdet.building import calibrate
    from trtdet.calibration.cache import version_number
    from trtdet.config import load_config
    from trtdet.files import prepare_target, write_atomically

    if options.output.suffix in (".npz", ".cache"):
        raise ConfigError(f"-o {options.output} names the ranges; the histograms and the cache are written beside it")
    prepare_target(options.output)
    started = time.perf_counter()
    calibrate_options = options_of(options, CalibrateOptions)
    version = version_number(calibrate_options.tensorrt)
    calibrated = calibrate(
        options.model,
        load_config(options.config),
        calibrate_options.calibration,
        progress=console.progress,
        quantization=calibrate_options.quantization,
        attention=calibrate_options.plan.int8_attention,
    )
    histograms = calibrate_options.calibration.histograms or options.output.with_suffix(".npz")
    cache = options.output.with_suffix(".cache")
    paths = [options.output, cache] if calibrated.reused else [options.output, histograms, cache]
    if not calibrated.reused:
        calibrated.collection.save(histograms)
    write_atomically(cache, calibrated.ranges.to_calibration_cache(version).encode())
    calibrated.ranges.save(options.output)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tensors = len(calibrated.ranges.tensors)
    source = f"from {histograms}" if calibrated.reused else f"{calibrated.collection.images} images"
    console.say(f"{tensors} ranges by {calibrated.ranges.rule}, {source}, {seconds:.1f} s, peak memory {peak:.0f} MB")
    console.say(f"wrote {', '.join(map(str, paths))}")
    return {
        "images": calibrated.collection.images,
        "skipped": list(calibrated.collection.skipped),
        "tensors": tensors,
        "rule": calibrated.ranges.rule,
        "reused": calibrated.reused,
        "seconds": round(seconds, 3),
        "peak_rss_mb": round(peak, 1),
        "ranges": str(options.output),
        "histograms": str(histograms),
        "calibration_cache": str(cache),
        "input_check": calibrated.seen.as_dict() if calibrated.seen is not None else None,
    }


COMMAND = Command(
    "calibrate",
    summary="collect histograms of activations on images, and choose ranges",
    add_options=model_options(
        "ranges.json",
        "where the ranges are written; the histograms and TensorRT's cache get its name",
        CalibrateOptions,
    ),
    run=_run,
    usage="MODEL --config CONFIG --images DIR -o ranges.json [options]",
)
