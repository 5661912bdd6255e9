"""``trtdet eval``: COCO mAP, and how two detectors differ."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.measured import finish
from trtdet.cli.options import (
    add_input_check,
    add_nms,
    add_output,
    add_runtime,
    add_target,
    check_suffix,
    config_if_given,
    nms_changes,
)
from trtdet.errors import ConfigError, DataError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.config import Config
    from trtdet.data import CocoDataset, ImageCache
    from trtdet.evaluation.agreement import AgreementOptions
    from trtdet.evaluation.scoring import Evaluation
    from trtdet.runtime.detector import Detector


def _options(parser: ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--images",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder of the annotated images; without --annotations, a folder or a .txt list of file names",
    )
    parser.add_argument(
        "--annotations",
        type=Path,
        metavar="JSON",
        help="the COCO instances file of --images; may be left out with --against",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="BUNDLE|MODEL",
        help="a reference to compare with; a MODEL is read with the configuration of the target",
    )
    parser.add_argument(
        "--agreement-threshold",
        type=float,
        default=0.25,
        metavar="S",
        help="with --against, the reference's detections with at least this score are what is to be found "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--evaluator-spread",
        action="store_true",
        help="with --against, run the target's model once more with onnxruntime's optimisations, and say how far it "
        "differs from itself",
    )
    parser.add_argument(
        "--resamples",
        type=int,
        default=1000,
        metavar="N",
        help="bootstrap resamples of the images, for --against (default: %(default)s)",
    )
    add_output(parser, "eval.json", "write the figures into this file, which 'trtdet report' reads", required=False)
    add_input_check(parser)
    add_nms(parser)
    add_runtime(parser)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    check_suffix(options.output, ".json")
    result = _measured(options, console)
    finish(options.output, console, (), json.dumps(result, indent=1))
    return result


def _measured(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.evaluation.agreement import AgreementOptions
    from trtdet.evaluation.comparison import open_pair
    from trtdet.evaluation.resampling import Bootstrap
    from trtdet.runtime.detector import Detector

    if options.annotations is None and options.against is None:
        raise ConfigError("eval needs --annotations to score with, or --against a reference, which needs none")
    if options.evaluator_spread and options.against is None:
        raise ConfigError("--evaluator-spread is told beside a comparison; give --against as well")
    config = config_if_given(options)
    if config is None and any(value is not None for value in nms_changes(options).values()):
        raise ConfigError("a bundle's NMS thresholds were chosen when it was built; build it again with others")
    agreement = AgreementOptions(options.agreement_threshold, Bootstrap(options.resamples))
    if options.against is None:
        detector = Detector.open(options.target, config, options.nms, options.runtime)
        dataset = _dataset(options, detector)
        seen = _looked_at(options, detector, config, dataset)
        return {**_scored(detector, dataset, console).as_dict(), "input_check": seen}
    pair = open_pair(options.target, options.against, config, options.nms, options.runtime)
    dataset = _dataset(options, pair[0])
    seen = _looked_at(options, pair[0], config, dataset)
    return {**_compared(pair, dataset, options, agreement, console), "input_check": seen}


def _looked_at(
    options: Namespace, detector: Detector, config: Config | None, dataset: CocoDataset
) -> dict[str, Any] | None:
    """What the detections look like; None where nobody asks."""
    from trtdet.evaluation.plausibility import examine_target

    if not options.check_input:
        return None
    return examine_target(options.target, detector, config, [image.path for image in dataset.images])


def _dataset(options: Namespace, detector: Detector) -> CocoDataset:
    from trtdet.data import CocoDataset

    if options.annotations is None:
        return CocoDataset.unannotated(options.images, detector.classes)
    return CocoDataset.load(options.annotations, options.images, detector.classes)


def _scored(detector: Detector, dataset: CocoDataset, console: Console, cache: ImageCache | None = None) -> Evaluation:
    """Runs the detector that is asked for, and prints what it scores and how it ran."""
    from trtdet.evaluation.scoring import evaluate

    done = evaluate(detector, dataset, _progress(console, "evaluating"), cache)
    if dataset.annotated:
        console.say(done.result)
        if done.masks is not None:
            console.say(f"masks:\n{done.masks}")
    console.say(
        f"{done.result.images} images, {done.result.detections} detections, {done.ms_per_image:.1f} ms an image; "
        f"{done.file} on {done.run_info}, NMS {done.nms}"
    )
    return done


def _progress(console: Console, stage: str) -> Callable[[int, int], None]:
    return lambda count, total: console.progress(stage, count, total)


def _compared(
    pair: tuple[Detector, Detector],
    dataset: CocoDataset,
    options: Namespace,
    agreement: AgreementOptions,
    console: Console,
) -> dict[str, Any]:
    """Runs two detectors on the same images and prints how they differ, in mAP where there are annotations."""
    from trtdet.data import ImageCache
    from trtdet.evaluation.agreement import agree
    from trtdet.evaluation.comparison import compare
    from trtdet.evaluation.scoring import evaluate
    from trtdet.evaluation.shifted_scores import score_shift
    from trtdet.evaluation.spread import check_spread, evaluator_spread

    cache = ImageCache()
    if options.evaluator_spread:
        check_spread(pair[0])
    done = _scored(pair[0], dataset, console, cache)
    # Its classes may be in another order.
    of_reference = _dataset(options, pair[1])
    # What could not be read was told already.
    read = tuple(image for image in of_reference.images if image.id in done.metric.detections)
    stage = _progress(console, "evaluating the reference")
    reference = evaluate(pair[1], replace(of_reference, images=read), stage, cache)
    agreed = agree(done, reference, agreement, _progress(console, "resampling the agreement"))
    if agreed.ap is None and not options.annotations:
        raise DataError(f"'{options.target}' cannot be compared without --annotations: {agreed.problem}")
    shift = score_shift(done, reference, agreement.bootstrap, _progress(console, "comparing scores"))
    against: dict[str, Any] = {"file": reference.file, "ran_on": str(reference.run_info), "nms": reference.nms}
    spread = {}
    if options.evaluator_spread:
        found = evaluator_spread(pair[0], done, agreement, _progress(console, "evaluating once more"), cache)
        spread = {"evaluator_spread": found.as_dict()}
    console.say(f"\n{shift}\n")
    if options.evaluator_spread:
        console.say(found)
    # The last line says what there is to say of the difference.
    if options.annotations:
        comparison = compare(done, reference, agreement.bootstrap, _progress(console, "resampling"))
        against = comparison.as_dict()
        console.say(f"{agreed}\n{comparison}")
        if done.masks is not None and reference.masks is not None:
            of_masks = compare(done, reference, agreement.bootstrap, _progress(console, "resampling masks"), "masks")
            against["masks"] = of_masks.as_dict()
            console.say(of_masks)
    else:
        console.say(f"against {reference.file}: {agreed}")
    figures = {"agreement": agreed.as_dict(), "score_shift": shift.as_dict(), **spread}
    return {**done.as_dict(), "against": {**against, **figures}}


COMMAND = Command("eval", "COCO mAP of a bundle or a model, and how it differs from another", _options, _run)
