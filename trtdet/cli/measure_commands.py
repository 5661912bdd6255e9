"""``trtdet audit``, ``bench`` and ``profile``: precision of each convolution as built, latency, and time by layer."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, add_target, argument, check_suffix, config_if_given
from trtdet.errors import BundleError, ConfigError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.bundle import Bundle


def _audit_options(parser: ArgumentParser) -> None:
    argument(parser, "bundle BUNDLE", "a bundle with an engine", type=Path)
    argument(parser, "--all", "list every finding (default: the costliest three of each kind)")
    what = "measured times of its layers, as trtexec --exportProfile writes them (default: estimated traffic)"
    argument(parser, "--times JSON", what, type=Path)
    what = (
        "write the model that the engine was built from, each node with its precision, bytes, time (measured with "
        "--times or --measure, else estimated) and error, for viewers such as Netron"
    )
    argument(parser, "--onnx FILE", what, type=Path)
    argument(parser, "--measure", "measure the times here, where the engine can run")
    group = parser.add_argument_group("estimate")
    argument(group, "--gpu NAME", "estimate its time on this GPU from published rates; 'list' names those known")
    argument(group, "--batch N", "images at once of the estimate (default: 1 32)", type=int, nargs="+")
    group = parser.add_argument_group("layer-by-layer comparison")
    argument(group, "--compare", "name the first layer whose output departs from onnxruntime's")
    argument(group, "--images DIR|LIST", "images to compare on; required for --compare", type=Path)
    argument(group, "--num-images N", "use N of them, evenly spaced", default=4)
    what = "signal-to-noise ratio below which a layer departs (default: by the engine's precision)"
    argument(group, "--limit DB", what, type=float)


def _audit(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.audit import Audit, load_times
    from trtdet.audit.agreement import compare_layers
    from trtdet.audit.gpus import gpu_named
    from trtdet.audit.roofline import estimate, estimate_tables, flow_of
    from trtdet.bundle import Bundle
    from trtdet.performance import layer_means

    if options.compare != (options.images is not None):
        raise ConfigError("--compare and --images belong together: give both")
    if options.limit is not None and not options.compare:
        raise ConfigError("--limit is of the layer-by-layer comparison", "give --compare and --images as well")
    if options.measure and options.times is not None:
        raise ConfigError("--measure and --times both give the times of layers: choose one of them")
    if options.batch is not None and options.gpu is None:
        raise ConfigError("--batch is of the estimate", "give --gpu as well")
    check_suffix(options.onnx, ".onnx")
    gpu = None if options.gpu is None else gpu_named(options.gpu)
    bundle = Bundle(options.bundle)
    if bundle.engine is None and "audit.json" not in bundle.manifest.files:
        title = bundle.manifest.backend.name
        raise BundleError(
            f"bundle '{options.bundle}' has no engine to audit, as {title} runs the model itself",
            "build it with --backend tensorrt or tensorrt-rtx",
        )
    audit = Audit.load(bundle.file("audit.json"))
    times = None
    if options.times is not None:
        times = load_times(options.times)
    elif options.measure:
        times = layer_means(options.bundle, console.progress)
    audit = audit if times is None else audit.timed(times)
    console.say(audit.summary)
    console.say(audit.report(options.all))
    plain = audit.as_dict()
    if gpu is not None:
        flow, batches = flow_of(bundle), options.batch or (1, 32)
        estimates = [estimate(flow, gpu, batch) for batch in batches]
        without_graph = [estimate(flow, gpu, n, graph=False) for n in batches]
        console.say("")
        console.say(estimate_tables(estimates, without_graph, options.all))
        plain["estimate"] = [each.as_dict() for each in estimates]
    if options.onnx is not None:
        plain["onnx"] = _annotate(options, bundle, times, console=console)
    if not options.compare:
        return plain
    result = compare_layers(bundle, options.images, options.num_images, limit=options.limit, progress=console.progress)
    console.say(result.table())
    console.say(result)
    return {**plain, "compare": result.as_dict()}


def _annotate(options: Namespace, bundle: Bundle, times: Mapping[str, float] | None, console: Console) -> str:
    """Writes the annotated model and returns its path."""
    from trtdet.audit.roofline import estimate, flow_of
    from trtdet.building.costs import gpu_of
    from trtdet.files import write_atomically
    from trtdet.report.annotation import Times, annotated
    from trtdet.report.runs import bundle_run

    if times is not None:
        layer_times = Times(times, "measured")
    else:
        gpu = gpu_of(options.gpu, bundle.manifest.backend.sms)
        batch = options.batch[0] if options.batch else 1
        layers = estimate(flow_of(bundle), gpu, batch).layers
        layer_times = Times({layer.name: layer.ms for layer in layers}, f"estimated for {gpu.name}, batch {batch}")
    model = annotated(bundle_run(options.bundle, bundle), layer_times)
    write_atomically(options.onnx, model.SerializeToString(deterministic=True))
    count = sum(bool(node.metadata_props) for node in model.graph.node)
    console.say(
        f"\nwrote {options.onnx}: {count} of {len(model.graph.node)} nodes annotated, times {layer_times.basis}"
    )
    return str(options.onnx)


_BATCH = "images at once (default: the fixed batch size, or 1)"
_IMAGES = "images to run: a folder or a .txt list (default: noise)"


def _bench_options(parser: ArgumentParser) -> None:
    add_target(parser, several=True)
    argument(parser, "--batch N", _BATCH, default=[], type=int, nargs="+")
    argument(
        parser, "--streams N", "execution contexts that run side by side (default: 1)", default=[1], type=int, nargs="+"
    )
    argument(parser, "--seconds S", "seconds that each target is measured for at each point", default=3.0)
    argument(parser, "--warm-up S", "seconds of warm-up, continued until times are steady", default=1.0)
    argument(parser, "--min-runs N", "runs of each point at least", default=50)
    what = "the target that the others are compared with (default: the first)"
    argument(parser, "--baseline BUNDLE|MODEL", what, type=Path)
    argument(parser, "--no-transfers", "leave the copies to and from the device out of the latency")
    argument(parser, "--images DIR|LIST", _IMAGES, type=Path)
    add_output(parser, "bench.json", "write the figures into this file as well", required=False)


def _bench(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.performance import BenchOptions, bench

    check_suffix(options.output, ".json")
    benchmark = bench(
        options.targets,
        config_if_given(options),
        BenchOptions(
            batches=tuple(options.batch),
            streams=tuple(options.streams),
            seconds=options.seconds,
            warm_up=options.warm_up,
            min_runs=options.min_runs,
            transfers=not options.no_transfers,
            images=options.images,
        ),
        baseline=options.baseline,
        progress=console.progress,
    )
    console.say(benchmark.table())
    return _finish(options, console, benchmark)


def _profile_options(parser: ArgumentParser) -> None:
    add_target(parser)
    argument(parser, "--batch N", _BATCH, type=int)
    argument(parser, "--runs N", "runs that are timed", default=50)
    argument(parser, "--warm-up N", "runs before they are counted", default=5)
    argument(parser, "--images DIR|LIST", _IMAGES, type=Path)
    what = "a target of the same network to profile in turns with it; lists the layers that are slower than there"
    argument(parser, "--against BUNDLE|MODEL", what, type=Path)
    argument(parser, "--top N", "layers to list", default=20)
    what = "write the figures, or a page with charts, into this file"
    add_output(parser, "profile.json|profile.html", what, required=False)


def _profile(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.performance import ProfileOptions, profile
    from trtdet.report import profile_page

    check_suffix(options.output, ".json", ".html")
    profiling = profile(
        options.target,
        config_if_given(options),
        ProfileOptions(options.batch, runs=options.runs, warm_up=options.warm_up, images=options.images),
        against=options.against,
        progress=console.progress,
    )
    console.say(profiling.table(options.top))
    page = options.output is not None and options.output.suffix == ".html"
    return _finish(options, console, profiling, text=profile_page(profiling) if page else "")


def _finish(options: Namespace, console: Console, measured: Any, text: str = "") -> dict[str, Any]:
    """Prints the warnings of a measurement, and writes it into the ``--output`` file."""
    from trtdet.files import write_atomically

    for warning in measured.warnings:
        console.warn(warning)
    result: dict[str, Any] = measured.as_dict()
    if options.output is not None:
        write_atomically(options.output, f"{text or json.dumps(result, indent=1)}\n".encode())
        console.say(f"wrote {options.output}")
    return result


AUDIT = Command(
    "audit",
    summary="show the precision of each convolution as built, and what prevents INT8",
    add_options=_audit_options,
    run=_audit,
    examples=(("bundle", "layers that are not in INT8, and why"),),
)
BENCH = Command(
    "bench",
    summary="measure latency and throughput of several targets side by side",
    add_options=_bench_options,
    run=_bench,
    examples=(
        ("int8 fp16 --seconds 5", "two bundles side by side"),
        ("m.onnx bundle --config c.yaml", "a model and a bundle"),
    ),
)
PROFILE = Command(
    "profile",
    summary="measure time by kind of operator and by layer",
    add_options=_profile_options,
    run=_profile,
    examples=(
        ("bundle", "time by layer"),
        ("int8 --against fp16", "and what differs"),
    ),
)
