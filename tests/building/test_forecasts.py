"""The forecast of a command lists the stages that the command then runs."""

import json
from dataclasses import replace

from models import for_onnxruntime

import trtdet.data.stream
from trtdet.building import build, forecasts
from trtdet.building.forecasts import Forecast, Part, foresee_build
from trtdet.cli import main
from trtdet.experiments.grid import foresee_sweep, sweep
from trtdet.experiments.search import foresee_tune, tune
from trtdet.options import SweepOptions, TuneOptions, changed
from trtdet.progress import ExpectedStage


class Told:
    """The stages that were told, and those that were expected."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.expected: list[ExpectedStage] = []

    def progress(self, stage: str, done: int, total: int) -> None:
        if stage not in self.stages[-1:]:
            self.stages.append(stage)

    @property
    def missing(self) -> list[str]:
        """Of what was expected to be done, what did not come in its order."""
        names = iter(self.stages)
        return [step.stage for step in self.expected if step.seconds and step.stage not in names]


def test_a_dry_run_says_the_stages_and_computes_and_writes_nothing(tiny, tmp_path, capsys, monkeypatch):
    def decoded(*_: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(trtdet.data.stream, "read_image", decoded)
    command = ["build", tiny.model, "--config", tiny.yaml, "--images", tiny.images, "--backend", "onnxruntime"]
    command += ["--int8-all", "-o", tmp_path / "b", "--dry-run"]
    assert main([str(word) for word in command]) == 0
    said = capsys.readouterr().out
    assert "calibrating" in said and "12 images" in said and "to do" in said
    assert "a factor of two or three either way" in said and said.endswith("nothing was computed\n")
    assert main([str(word) for word in (*command, "--json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dry_run"] and found["stages"][0]["stage"] == "checking the input"
    assert found["seconds"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_build_goes_through_the_stages_that_were_foreseen_in_their_order(tiny, options, tmp_path):
    told = Told()
    ranked = changed(options, keep_fp16=1, effort="smooth,bias")
    build(tiny.model, tiny.config, tmp_path / "b", ranked, told.progress, told.expected.extend)
    assert told.missing == [], told.stages
    assert all(step.seconds for step in told.expected)
    assert {"calibrating", "ranking", "correcting: means"} <= {step.stage for step in told.expected}


def test_candidates_that_are_timed_here_are_foreseen_before_the_engine(tiny, options, tmp_path, monkeypatch):
    monkeypatch.setattr(forecasts, "timed_here", lambda options, caps: True)
    scored = changed(options, val_images=tiny.images, annotations=tiny.annotations)
    parts = foresee_build(tiny.model, tiny.config, tmp_path / "b", scored).parts
    assert [part.stage for part in parts[-2:]] == ["measuring candidates", parts[-1].stage]
    assert "building the engine" in parts[-1].stage
    assert parts[-2].what == "about 10 networks on 12 images" and parts[-2].seconds > 0


def test_what_is_there_already_is_not_foreseen(tiny, options, tmp_path):
    build(tiny.model, tiny.config, tmp_path / "b", changed(options, effort="none"))
    same = foresee_build(tiny.model, tiny.config, tmp_path / "b", changed(options, effort="none"))
    assert (same.parts, same.seconds, same.table().notes) == ((), 0, ("everything is there already",))
    other = changed(options, calibration=changed(options.calibration, rule="minmax"))
    parts = {part.stage: part for part in foresee_build(tiny.model, tiny.config, tmp_path / "b", other).parts}
    assert (parts["calibrating"].there, parts["calibrating"].seconds) == ("the bundle at -o", 0)
    assert parts["correcting: means"].seconds > 0
    fewer = changed(options, calibration=changed(options.calibration, num_images=5), effort="none")
    calibrating = foresee_build(tiny.model, tiny.config, tmp_path / "b", fewer).parts[1]
    assert (calibrating.what, calibrating.there) == ("5 images", "")


def test_a_forecast_is_a_table_and_steps_of_a_bar():
    found = Forecast((Part("calibrating", "histograms", 0.0, "the bundle at -o"), Part("ranking", "2 layers", 3.0)))
    assert found.steps == [ExpectedStage("calibrating", 0.0), ExpectedStage("ranking", 3.0)]
    assert found.table().as_dicts() == [
        {"stage": "calibrating", "of": "histograms", "state": "the bundle at -o", "about s": None},
        {"stage": "ranking", "of": "2 layers", "state": "to do", "about s": 3.0},
    ]
    assert found.as_dict() == {
        "stages": [
            {"stage": "calibrating", "of": "histograms", "there": "the bundle at -o", "seconds": 0.0},
            {"stage": "ranking", "of": "2 layers", "there": None, "seconds": 3.0},
        ],
        "seconds": 3.0,
        "plan": None,
    }
    assert replace(found, plan="the default plan").as_dict()["plan"] == "the default plan"


def test_a_sweep_goes_through_the_stages_that_were_foreseen_and_then_there_is_nothing_to_do(tiny, tmp_path, capsys):
    axes = SweepOptions(rules=("minmax", "percentile"), efforts=("smooth,bias",), keeps=(0, 1), backend="onnxruntime")
    options = changed(axes, images=tiny.images, int8_all=True, **tiny.labelled)
    told = Told()
    first = replace(options, rules=("minmax",))
    sweep(tiny.model, tiny.config, tmp_path / "s", first, told.progress, told.expected.extend)
    assert told.missing == [], told.stages
    assert [step.stage for step in told.expected if step.stage.startswith(("calibrating", "ranking", "scoring"))] == [
        *("calibrating", "scoring FP32", "scoring minmax, 0 in FP16", "ranking", "scoring minmax, 1 in FP16"),
    ]
    # Another rule: histograms are there, and FP32 is scored for the differences.
    more = foresee_sweep(tiny.model, tiny.config, tmp_path / "s", options)
    assert (more.parts[0].there, more.parts[0].seconds) == (str(tmp_path / "s" / "histograms.npz"), 0)
    again = Told()
    sweep(tiny.model, tiny.config, tmp_path / "s", options, again.progress, again.expected.extend)
    assert [step.stage for step in again.expected] == [part.stage for part in more.parts]
    assert again.missing == [], again.stages
    assert foresee_sweep(tiny.model, tiny.config, tmp_path / "s", options).parts == ()
    command = ["sweep", tiny.model, "--config", tiny.yaml, "--images", tiny.images, "--val-images", tiny.images]
    command += ["--annotations", tiny.annotations, "--backend", "onnxruntime", "-o", tmp_path / "new", "--dry-run"]
    command += ["--json"]
    assert main([str(word) for word in command]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dry_run"] and found["stages"][0]["stage"] == "calibrating"
    assert not (tmp_path / "new").exists()


def test_a_tune_goes_through_the_stages_that_were_foreseen_and_then_measures_nothing(tiny, tmp_path, capsys):
    build_options = for_onnxruntime(effort="bias", images=tiny.images, num_images=6)
    options = TuneOptions(build=changed(build_options, rank_images=2), points=2)
    told = Told()
    found = tune(tiny.model, tiny.config, tmp_path / "t", options, told.progress, told.expected.extend)
    # There may be fewer plans than were foreseen.
    plans = [f"measuring plan {number}" for number in range(len(found.variants) + 1, 9)]
    assert [stage for stage in told.missing if stage not in plans] == [], told.stages
    assert {"calibrating", "ranking", "measuring the float model", "measuring plan 2"} <= set(told.stages)
    after = {part.stage: part for part in foresee_tune(tiny.model, tiny.config, tmp_path / "t", options).parts}
    assert after["calibrating"].there == after["correcting"].there == str(tmp_path / "t" / "corrected.npz")
    assert after["ranking"].there == str(tmp_path / "t" / "ranking.jsonl")
    assert after["measuring plans"].what == f"{len(found.variants)} plans"
    command = ["tune", tiny.model, "--config", tiny.yaml, "--images", tiny.images, "--num-images", 6]
    command += ["--backend", "onnxruntime", "-o", tmp_path / "new", "--dry-run"]
    assert main([str(word) for word in command]) == 0
    said = capsys.readouterr().out
    assert "measuring plan 1" in said and said.endswith("nothing was computed\n")
    assert not (tmp_path / "new").exists()
