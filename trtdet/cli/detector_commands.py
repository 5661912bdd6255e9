"""``trtdet eval`` and ``trtdet infer``: COCO mAP, how two detectors differ, and pictures with boxes."""

from __future__ import annotations

import json
import warnings
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, add_rows, add_target, argument, check_suffix, config_if_given, options_of
from trtdet.errors import ConfigError, DataError, ImplausibleDetections
from trtdet.options import EvalOptions
from trtdet.options.fields import Runtime
from trtdet.progress import Console
from trtdet.tables import counted

if TYPE_CHECKING:
    from trtdet.data import CocoDataset, ImageCache
    from trtdet.evaluation.agreement import AgreementOptions
    from trtdet.evaluation.scoring import Evaluation
    from trtdet.runtime.detector import Detector

_RUNTIME = "what is run of a bundle: its engine where possible and else its ONNX model (auto), or one of the two alone"


def _eval_options(parser: ArgumentParser) -> None:
    add_target(parser)
    what = "the folder of the annotated images; without --annotations, a folder or a .txt list of file names"
    argument(parser, "--images DIR", what, type=Path, required=True)
    what = "the COCO instances file of --images; may be left out with --against"
    argument(parser, "--annotations JSON", what, type=Path)
    what = "a reference to compare with; a MODEL is read with the configuration of the target"
    argument(parser, "--against BUNDLE|MODEL", what, type=Path)
    what = "with --against, the reference's detections with at least this score are what is to be found"
    argument(parser, "--agreement-threshold S", what, default=0.25)
    argument(parser, "--resamples N", "bootstrap resamples of the images, for --against", default=1000)
    add_output(parser, "eval.json", "write the figures into this file, which 'trtdet report' reads", required=False)
    argument(parser, "--runtime", _RUNTIME, default="auto", choices=get_args(Runtime))
    add_rows(parser, EvalOptions)


def _eval(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.evaluation.agreement import AgreementOptions
    from trtdet.evaluation.comparison import open_pair
    from trtdet.evaluation.plausibility import examine_target
    from trtdet.evaluation.resampling import Bootstrap
    from trtdet.files import write_atomically
    from trtdet.runtime.detector import Detector

    check_suffix(options.output, ".json")
    if options.annotations is None and options.against is None:
        raise ConfigError("eval needs --annotations to score with, or --against a reference, which needs none")
    config, eval_options = config_if_given(options), options_of(options, EvalOptions)
    if config is None and eval_options.nms.values:
        raise ConfigError("a bundle's NMS thresholds were chosen when it was built; build it again with others")
    if config is not None:
        config = config.with_nms(**eval_options.nms.values)
    agreement = AgreementOptions(options.agreement_threshold, Bootstrap(options.resamples))
    reference = None
    if options.against is None:
        detector = Detector.open(options.target, config, eval_options.nms.mode, runtime=options.runtime)
    else:
        detector, reference = open_pair(
            options.target, options.against, config, nms=eval_options.nms.mode, runtime=options.runtime
        )
    dataset = _dataset(options, detector)
    input_check = None
    if eval_options.check_input:
        input_check = examine_target(options.target, detector, config, paths=[image.path for image in dataset.images])
    if reference is None:
        result = _scored(detector, dataset, console).as_dict()
    else:
        result = _compared((detector, reference), dataset, options, agreement=agreement, console=console)
    if dataset.annotated and result["map"] < _NOTHING:
        warnings.warn(_of_low_score(result["map"], input_check), ImplausibleDetections, stacklevel=2)
    result = {**result, "input_check": input_check}
    if options.output is not None:
        write_atomically(options.output, f"{json.dumps(result, indent=1)}\n".encode())
        console.say(f"wrote {options.output}")
    return result


_NOTHING = 0.01
"""mAP, as a fraction, of a detector that does not work on the images."""


def _of_low_score(score: float, check: dict[str, Any] | None) -> str:
    """A warning of an mAP next to 0, with what the input check says."""
    if check is None:
        advice = "the input check was off: --set calibration.check_input=true says what may be wrong"
    elif check["warning"]:
        advice = check["warning"]
    else:
        advice = (
            f"the input check sees a working detector, {check['detections_per_image']:.1f} confident boxes an image: "
            "compare 'classes' and their order with the categories of the annotations, and these with the images"
        )
    return f"mAP is {100 * score:.2f}, under 1; {advice}"


def _dataset(options: Namespace, detector: Detector) -> CocoDataset:
    from trtdet.data import CocoDataset

    if options.annotations is None:
        return CocoDataset.unannotated(options.images, detector.classes)
    categories = dict(options_of(options, EvalOptions).categories)
    return CocoDataset.load(options.annotations, options.images, detector.classes, categories=categories)


def _scored(detector: Detector, dataset: CocoDataset, console: Console, cache: ImageCache | None = None) -> Evaluation:
    """Evaluates a detector and prints its score, and how it ran."""
    from trtdet.evaluation.scoring import evaluate

    evaluation = evaluate(detector, dataset, partial(console.progress, "evaluating"), cache=cache)
    if dataset.annotated:
        console.say(evaluation.result)
        for part in evaluation.scored_parts:
            console.say(f"{part.replace('_', ' ')}:\n{evaluation.score_of(part)}")
    console.say(
        f"{counted(evaluation.result.images)}, {evaluation.result.detections} detections, "
        f"{evaluation.ms_per_image:.1f} ms an image; {evaluation.file} on {evaluation.run_info}, NMS {evaluation.nms}"
    )
    return evaluation


def _compared(
    pair: tuple[Detector, Detector],
    dataset: CocoDataset,
    options: Namespace,
    agreement: AgreementOptions,
    console: Console,
) -> dict[str, Any]:
    """Evaluates two detectors on the same images and prints their differences, in mAP if there are annotations."""
    from trtdet.data import ImageCache
    from trtdet.evaluation.agreement import agree, agreeing_parts
    from trtdet.evaluation.comparison import compare
    from trtdet.evaluation.scoring import evaluate
    from trtdet.evaluation.shifted_scores import score_shift

    cache, show = ImageCache(), console.progress
    evaluation = _scored(pair[0], dataset, console, cache=cache)
    # The reference may order its classes differently. Unreadable images were reported above.
    dataset = _dataset(options, pair[1])
    dataset = replace(dataset, images=tuple(im for im in dataset.images if im.id in evaluation.metric.detections))
    reference = evaluate(pair[1], dataset, partial(show, "evaluating the reference"), cache=cache)
    agreement_score = agree(evaluation, reference, agreement, progress=partial(show, "resampling the agreement"))
    if agreement_score.ap is None and not options.annotations:
        raise DataError(f"'{options.target}' cannot be compared without --annotations: {agreement_score.problem}")
    bootstrap = agreement.bootstrap
    shift = score_shift(evaluation, reference, bootstrap, progress=partial(show, "comparing scores"))
    figures = {"agreement": agreement_score.as_dict(), "score_shift": shift.as_dict()}
    agreeing = [
        agree(evaluation, reference, agreement, progress=partial(show, f"resampling {part.replace('_', ' ')}"), of=part)
        for part in agreeing_parts(evaluation, reference)
    ]
    if agreeing:
        figures["agreement_of_parts"] = {one.of: one.as_dict() for one in agreeing}
    console.say(f"\n{shift}\n")
    # The last line printed is the verdict on the difference.
    if options.annotations:
        comparison = compare(evaluation, reference, bootstrap, progress=partial(show, "resampling"))
        against: dict[str, Any] = comparison.as_dict()
        console.say("\n".join(map(str, (agreement_score, *agreeing, comparison))))
        for part in evaluation.scored_parts if evaluation.scored_parts == reference.scored_parts else ():
            stage = f"resampling {part.replace('_', ' ')}"
            of_part = compare(evaluation, reference, bootstrap, progress=partial(show, stage), of=part)
            against[part] = of_part.as_dict()
            console.say(of_part)
    else:
        against = {"file": reference.file, "ran_on": str(reference.run_info), "nms": reference.nms}
        console.say("\n".join([*map(str, agreeing), f"against {reference.file}: {agreement_score}"]))
    return {**evaluation.as_dict(), "against": {**against, **figures}}


def _infer_options(parser: ArgumentParser) -> None:
    add_target(parser)
    argument(parser, "images IMAGE|DIR|LIST", "image files, folders, or .txt lists of names", type=Path, nargs="+")
    add_output(parser, "DIR", "the folder of the pictures and of detections.json")
    argument(parser, "--score-threshold S", "detections below it are neither drawn nor listed, 0 to 1", default=0.3)
    argument(parser, "--runtime", _RUNTIME, default="auto", choices=get_args(Runtime))


_LOOKED_AT = 16
"""Images on which ``infer`` checks whether the detector works."""


def _infer(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import evenly, find_images
    from trtdet.evaluation.judging import FEWEST_IMAGES
    from trtdet.evaluation.plausibility import examine_target
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.pictures import infer

    images: list[Path] = []
    for source in options.images:
        images += find_images(source) if source.is_dir() or source.suffix.lower() == ".txt" else [source]
    config = config_if_given(options)
    detector = Detector.open(options.target, config, runtime=options.runtime)
    if len(images) >= FEWEST_IMAGES:
        some = evenly(images, _LOOKED_AT)
        examine_target(options.target, detector, config, paths=some, alternatives=False)
    pictures = infer(
        detector,
        images,
        options.output,
        score_threshold=options.score_threshold,
        progress=partial(console.progress, "detecting"),
    )
    total = sum(len(row["detections"]) for row in pictures.detections)
    ran_on = str(detector.runner.run_info)
    console.say(
        f"{counted(total, 'detection')} in {counted(len(pictures.pictures))} on {ran_on}; "
        f"wrote {pictures.folder}, {pictures.json}"
    )
    return {"folder": str(pictures.folder), "images": list(pictures.detections), "ran_on": ran_on}


EVAL = Command(
    "eval",
    summary="score a bundle or a model with COCO mAP, and compare it with another",
    add_options=_eval_options,
    run=_eval,
)
INFER = Command("infer", summary="draw boxes on images, and write them as JSON", add_options=_infer_options, run=_infer)
