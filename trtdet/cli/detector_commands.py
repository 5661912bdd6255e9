"""``trtdet eval`` and ``trtdet predict``: COCO mAP, how two detectors differ, and pictures with boxes."""

from __future__ import annotations

import json
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import closing
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


_MOST_DIGITS = 10
"""Numbers of cameras have fewer digits than this."""

_NOTHING = 0.01
"""mAP, as a fraction, below which a detector counts as not working on the images."""


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


def _predict_options(parser: ArgumentParser) -> None:
    add_target(parser)
    what = (
        "image and video files, folders, patterns, .txt lists of names, the number of a camera, or the address of a "
        "stream (rtsp://, http://)"
    )
    argument(parser, "sources SOURCE", what, nargs="+")
    what = (
        "a folder for pictures, videos and detections.jsonl, or a FILE.jsonl for the lines alone (default: one line of "
        "text for each image or frame on standard output)"
    )
    add_output(parser, "DIR|FILE.jsonl", what, required=False)
    argument(parser, "--score-threshold S", "detections below it are left out, 0 to 1", default=0.25)
    argument(parser, "--runtime", _RUNTIME, default="auto", choices=get_args(Runtime))


_LOOKED_AT = 16
"""Images on which ``predict`` checks whether the detector works."""


def _predict(options: Namespace, console: Console) -> None:
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.prediction import Prediction
    from trtdet.runtime.saving import save_predictions
    from trtdet.runtime.sources import expanded, is_video, length

    sources: list[Path | str | int] = []
    for source in options.sources:
        is_camera = source.isdecimal() and len(source) < _MOST_DIGITS and not Path(source).exists()
        sources += [int(source)] if is_camera else expanded(source)
    total = length(sources)
    detector = Detector.open(options.target, config_if_given(options), runtime=options.runtime)
    _look_at(options, detector, sources)
    images = objects = 0

    def tell(prediction: Prediction) -> None:
        nonlocal images, objects
        images, objects = images + 1, objects + len(prediction)
        if options.json:
            console.give(prediction.to_dict())
        elif options.output is None:
            console.say(prediction)
        # Videos need not have as many frames as they state.
        console.progress("detecting", min(images, total - 1) if total else 0, total or 1)

    predictions = detector.predict(sources, score_threshold=options.score_threshold, stream=True)
    wrote = ""
    if options.output is None:
        with closing(predictions):
            for prediction in predictions:
                tell(prediction)
    else:
        saved = save_predictions(predictions, options.output, tell)
        few = (*saved.videos, saved.detections) if len(saved.videos) < 4 else (saved.detections,)
        wrote = "; wrote " + ", ".join(map(str, [*([options.output] if saved.pictures else []), *few]))
    console.progress("detecting", total or 1, total or 1)
    ran_on = detector.runner.run_info
    what = "image" if all(isinstance(source, Path) and not is_video(source) for source in sources) else "frame"
    line = f"{counted(objects, 'detection')} in {counted(images, what)} on {ran_on}{wrote}"
    if options.output is None:
        console.line(line)
    else:
        console.say(line)


def _look_at(options: Namespace, detector: Detector, sources: Sequence[Path | str | int]) -> None:
    """Warns if the detections on image files show a wrong configuration."""
    from trtdet.data import evenly
    from trtdet.evaluation.judging import FEWEST_IMAGES
    from trtdet.evaluation.plausibility import examine_target
    from trtdet.runtime.sources import is_video

    images = [source for source in sources if isinstance(source, Path) and not is_video(source)]
    if len(images) >= FEWEST_IMAGES:
        some, config = evenly(images, _LOOKED_AT), config_if_given(options)
        examine_target(options.target, detector, config, paths=some, alternatives=False)


EVAL = Command(
    "eval",
    summary="score a bundle or a model with COCO mAP, and compare it with another",
    add_options=_eval_options,
    run=_eval,
    examples=(
        ("bundle --images val --annotations val.json", "COCO mAP"),
        ("bundle --images val --annotations val.json --against m.onnx", "and what INT8 cost"),
        ("bundle --images photos --against m.onnx", "without annotations"),
    ),
)
PREDICT = Command(
    "predict",
    summary="detect on images, videos and cameras; draw pictures and videos, write JSON lines",
    add_options=_predict_options,
    run=_predict,
    json="print one JSON object on a line for each image or frame",
    usage="BUNDLE|MODEL SOURCE ... [-o DIR|FILE.jsonl]",
    examples=(
        ("shapes-int8 street.jpg", "a line of text for each image"),
        ("shapes-int8 photos -o found", "pictures and detections.jsonl"),
        ("shapes-int8 street.mp4 -o found", "a video with boxes"),
        ("shapes-int8 rtsp://camera/1 --json", "JSON lines on standard output"),
        ("yolox.onnx 0 --config yolox -o found", "a camera, until Ctrl-C"),
    ),
)
