"""``trtdet audit``: the precision of each convolution as built."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.errors import ConfigError
from trtdet.progress import Console


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
    parser.add_argument("--measure", action="store_true", help="measure the times here, where the engine can run")
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
    from trtdet.bundle import Bundle
    from trtdet.performance import layer_means

    if options.compare != (options.images is not None):
        raise ConfigError("--compare and --images belong together: give both")
    if options.measure and options.times is not None:
        raise ConfigError("--measure and --times both give the times of layers: choose one of them")
    bundle = Bundle(options.bundle)
    found = Audit.load(bundle.file("audit.json"))
    if options.times is not None:
        found = found.timed(load_times(options.times))
    elif options.measure:
        found = found.timed(layer_means(options.bundle, console.progress))
    console.say(f"{found.summary}\n{found.report(options.all)}")
    if not options.compare:
        return found.as_dict()
    agreed = compare_layers(bundle, options.images, options.num_images, options.limit, console.progress)
    console.say(f"{agreed.table()}\n{agreed}")
    return {**found.as_dict(), "compare": agreed.as_dict()}


COMMAND = Command("audit", "audit each convolution's precision, and what got in the way of INT8", _options, _run)
