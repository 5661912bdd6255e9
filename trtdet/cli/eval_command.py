"""``trtdet eval``: COCO mAP."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_nms, add_runtime, add_target, config_if_given, nms_changes
from trtdet.errors import ConfigError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.evaluation.scoring import Evaluation
    from trtdet.runtime.detector import Detector


def _options(parser: ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--images", type=Path, required=True, metavar="DIR", help="the folder of the annotated images")
    parser.add_argument(
        "--annotations", type=Path, required=True, metavar="JSON", help="the COCO instances file of --images"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="BUNDLE|MODEL",
        help="a reference to compare with; a MODEL is read with the configuration of the target",
    )
    parser.add_argument(
        "--resamples",
        type=int,
        default=1000,
        metavar="N",
        help="bootstrap resamples of the images, for --against (default: %(default)s)",
    )
    add_nms(parser)
    add_runtime(parser)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import CocoDataset, ImageCache
    from trtdet.evaluation.comparison import compare, open_pair
    from trtdet.evaluation.resampling import Bootstrap
    from trtdet.evaluation.scoring import evaluate
    from trtdet.runtime.detector import Detector

    cache = ImageCache(None if options.against else 0)

    def scored(stage: str, detector: Detector) -> Evaluation:
        dataset = CocoDataset.load(options.annotations, options.images, detector.classes)
        return evaluate(detector, dataset, lambda count, total: console.progress(stage, count, total), cache)

    config = config_if_given(options)
    if config is None and any(value is not None for value in nms_changes(options).values()):
        raise ConfigError("a bundle's NMS thresholds were chosen when it was built; build it again with others")
    bootstrap, reference = Bootstrap(options.resamples), None
    if options.against:
        detector, reference = open_pair(options.target, options.against, config, options.nms, options.runtime)
    else:
        detector = Detector.open(options.target, config, options.nms, options.runtime)
    done = scored("evaluating", detector)
    console.say(done.result)
    console.say(
        f"{done.result.images} images, {done.result.detections} detections, {done.ms_per_image:.1f} ms an image; "
        f"{done.file} on {done.run_info}, NMS {done.nms}"
    )
    if reference is None:
        return done.as_dict()
    comparison = compare(
        done,
        scored("evaluating the reference", reference),
        bootstrap,
        lambda count, total: console.progress("resampling", count, total),
    )
    console.say(comparison)
    return {**done.as_dict(), "against": comparison.as_dict()}


COMMAND = Command("eval", "COCO mAP of a bundle or a model, and its difference to another", _options, _run)
