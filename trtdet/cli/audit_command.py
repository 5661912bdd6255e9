"""``trtdet audit``: the precision of each convolution as built."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import check_suffix
from trtdet.errors import BundleError, ConfigError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.bundle import Bundle

_BATCHES = (1, 32)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a bundle with an engine")
    parser.add_argument(
        "--all", action="store_true", help="list every finding (default: the costliest three of each kind)"
    )
    parser.add_argument(
        "--times",
        type=Path,
        metavar="JSON",
        help="measured times of its layers, as trtexec --exportProfile writes them (default: estimated traffic)",
    )
    parser.add_argument("--file", action="store_true", help="say what fills the engine's file")
    parser.add_argument(
        "--onnx",
        type=Path,
        metavar="FILE",
        help="write the model that the engine was built from, each node with its precision, bytes, time (measured with "
        "--times or --measure, else estimated) and error, for viewers such as Netron",
    )
    parser.add_argument("--measure", action="store_true", help="measure the times here, where the engine can run")
    group = parser.add_argument_group("estimate")
    group.add_argument(
        "--gpu", metavar="NAME", help="estimate its time on this GPU from published rates; 'list' names those known"
    )
    group.add_argument(
        "--batch", type=int, nargs="+", metavar="N", help="images at once of the estimate (default: 1 32)"
    )
    group = parser.add_argument_group("layer-by-layer comparison")
    group.add_argument(
        "--compare", action="store_true", help="name the first layer whose output departs from onnxruntime's"
    )
    group.add_argument("--images", type=Path, metavar="DIR|LIST", help="images to compare on; required for --compare")
    group.add_argument(
        "--num-images", type=int, default=4, metavar="N", help="use N of them, evenly spaced (default: %(default)s)"
    )
    group.add_argument(
        "--limit",
        type=float,
        metavar="DB",
        help="signal-to-noise ratio below which a layer departs (default: by the engine's precision)",
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.audit import Audit, load_times
    from trtdet.audit.agreement import compare_layers
    from trtdet.audit.engine_file import parts_of
    from trtdet.audit.gpus import gpu_named
    from trtdet.audit.roofline import estimate, flow_of
    from trtdet.audit.roofline_tables import estimate_tables
    from trtdet.bundle import Bundle
    from trtdet.performance import layer_means

    if options.compare != (options.images is not None):
        raise ConfigError("--compare and --images belong together: give both")
    if options.measure and options.times is not None:
        raise ConfigError("--measure and --times both give the times of layers: choose one of them")
    if options.batch is not None and options.gpu is None:
        raise ConfigError("--batch is of the estimate", "give --gpu as well")
    check_suffix(options.onnx, ".onnx")
    gpu = None if options.gpu is None else gpu_named(options.gpu)
    bundle = Bundle(options.bundle)
    found = Audit.load(bundle.file("audit.json"))
    times = None
    if options.times is not None:
        times = load_times(options.times)
    elif options.measure:
        times = layer_means(options.bundle, console.progress)
    found = found if times is None else found.timed(times)
    console.say(found.summary)
    console.say(found.report(options.all))
    plain = found.as_dict()
    if gpu is not None:
        flow, batches = flow_of(bundle), options.batch or _BATCHES
        estimates = [estimate(flow, gpu, batch) for batch in batches]
        alone = [estimate(flow, gpu, n, graph=False) for n in batches]
        console.say("")
        console.say(estimate_tables(estimates, alone, options.all))
        plain["estimate"] = [one.as_dict() for one in estimates]
    if options.file:
        if bundle.engine is None:
            raise BundleError(f"'{options.bundle}' has no engine file", "build it for TensorRT or TensorRT-RTX")
        filled = parts_of(bundle.engine.read_bytes(), found.layers)
        console.say("")
        console.say(filled.table())
        plain["engine_file"] = filled.as_dict()
    if options.onnx is not None:
        plain["onnx"] = _annotate(options, bundle, times, console)
    if not options.compare:
        return plain
    agreed = compare_layers(bundle, options.images, options.num_images, options.limit, console.progress)
    console.say(agreed.table())
    console.say(agreed)
    return {**plain, "compare": agreed.as_dict()}


def _annotate(options: Namespace, bundle: Bundle, times: Mapping[str, float] | None, console: Console) -> str:
    """Writes the annotated model; its path."""
    from trtdet.audit.gpus import gpu_named
    from trtdet.audit.roofline import estimate, flow_of
    from trtdet.files import write_atomically
    from trtdet.pipeline.stages.costs import default_gpu
    from trtdet.report.annotation import Times, annotated
    from trtdet.report.runs import Run

    if times is not None:
        known = Times(times, "measured")
    else:
        gpu = default_gpu(bundle.manifest.backend.sms) if options.gpu is None else gpu_named(options.gpu)
        batch = options.batch[0] if options.batch else 1
        made = estimate(flow_of(bundle), gpu, batch)
        known = Times({layer.name: layer.ms for layer in made.layers}, f"estimated for {gpu.name}, batch {batch}")
    model = annotated(Run(options.bundle, "bundle", bundle=bundle), known)
    write_atomically(options.onnx, model.SerializeToString(deterministic=True))
    count = sum(bool(node.metadata_props) for node in model.graph.node)
    console.say(f"\nwrote {options.onnx}: {count} of {len(model.graph.node)} nodes annotated, times {known.basis}")
    return str(options.onnx)


COMMAND = Command("audit", "audit each convolution's precision, and what got in the way of INT8", _options, _run)
