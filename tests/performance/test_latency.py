"""Timing with simulated runners of known times, so that the machine's speed does not matter."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from trtdet.backends import OnnxRunner, RunInfo
from trtdet.config import load_config
from trtdet.errors import BackendError, ConfigError, DataError
from trtdet.exporter import SHAPES_MODEL
from trtdet.performance import BenchOptions, Target, bench, latency, measure, open_targets
from trtdet.performance.latency import Slice
from trtdet.performance.results import ROUNDS, Latency, paired_ratio
from trtdet.tables import Table

CONFIG = load_config("shapes")
SHORT = BenchOptions(seconds=1.0, warm_up=0.0, min_runs=2)


class Clock:
    """Seconds that pass only while something runs, in each thread for itself."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __call__(self) -> float:
        return getattr(self._local, "now", 0.0)

    def pass_by(self, milliseconds: float) -> None:
        self._local.now = self() + milliseconds / 1000


@dataclass
class Script:
    """A context: asks what a run takes, and says that it ran."""

    owner: Scripted
    number: int

    def run(self, transfers: bool = True) -> float:
        owner = self.owner
        owner.log.append((owner.name, transfers))
        milliseconds = owner.takes(self, transfers)
        owner.clock.pass_by(milliseconds)
        return milliseconds

    def compute(self) -> float:
        return self.run(False)


class Scripted:
    """A runner whose contexts take what a function says."""

    input, outputs, run_info = "images", ("boxes",), RunInfo("a device of paper", "a library of paper")

    def __init__(
        self,
        name: str,
        takes: Callable[[Script, bool], float],
        clock: Clock,
        log: list[tuple[str, bool]] | None = None,
        batch: int | None = None,
        largest_batch: int | None = None,
    ) -> None:
        self.name, self.takes, self.clock = name, takes, clock
        self.log = [] if log is None else log
        self.batch, self.largest_batch = batch, largest_batch
        self.on_device = True
        self.contexts: list[Script] = []

    def clocks(self) -> None:
        """Not known."""

    def new_context(self, images: NDArray[np.float32]) -> Script:
        self.contexts.append(Script(self, len(self.contexts)))
        return self.contexts[-1]


def target(runner: Any, name: str = "") -> Target:
    return Target(name or runner.name, runner, CONFIG.input, "engine", "native")


def constant(name: str, milliseconds: float, clock: Clock, **more: Any) -> Target:
    return target(Scripted(name, lambda context, transfers: milliseconds, clock, **more))


def run(targets: Sequence[Target], options: BenchOptions = SHORT, clock: Clock | None = None, **more: Any) -> Any:
    return measure(targets, options, clock=clock or targets[0].runner.clock, **more)  # type: ignore[attr-defined]


def test_latency_sums_up_its_runs():
    found = Latency.of(np.arange(1.0, 102.0))
    assert (found.mean, found.p50, found.p95, found.p99) == (51.0, 51.0, 96.0, 100.0)
    assert found.stddev == pytest.approx(np.sqrt(101 * 102 / 12))
    assert (found.shortest, found.longest, found.runs) == (1.0, 101.0, 101)


def test_the_ratio_of_times_that_do_not_scatter_is_exact():
    found = paired_ratio(np.full(ROUNDS, 6.1), np.full(ROUNDS, 10.0))
    assert (found.value, found.low, found.high) == pytest.approx((0.61, 0.61, 0.61))
    assert str(found) == "0.610 (0.610 .. 0.610)"


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=5, max_size=30), st.floats(0.1, 10))
def test_a_drift_that_hits_both_falls_out_and_the_other_way_round_is_the_inverse(rounds, scale):
    first, second = np.array(rounds).T
    drift = np.geomspace(1, 5, len(rounds))
    found = paired_ratio(first, second)
    assert found.low <= found.value <= found.high
    for one, factor in ((paired_ratio(first * drift, second * drift), 1), (paired_ratio(first * scale, second), scale)):
        expected = (found.low * factor, found.value * factor, found.high * factor)
        assert (one.low, one.value, one.high) == pytest.approx(expected, rel=1e-9)
    inverse = paired_ratio(second, first)
    assert (1 / inverse.high, 1 / inverse.value, 1 / inverse.low) == pytest.approx(
        (found.low, found.value, found.high), rel=1e-9
    )


def test_the_interval_is_that_of_the_tables_of_signed_ranks():
    # For 20 pairs P(T <= 60) = 0.0487 and P(T <= 61) = 0.0527: 60 means lie outside on either side.
    logs = np.linspace(-1, 1, 20) ** 3
    rows, columns = np.triu_indices(20)
    means = np.sort((logs[rows] + logs[columns]) / 2)
    found = paired_ratio(np.exp(logs), np.ones(20))
    assert np.log([found.low, found.high]) == pytest.approx([means[60], means[209 - 60]])


def test_a_round_that_hit_one_of_the_two_moves_neither_ratio_nor_interval_far():
    generator = np.random.default_rng(0)
    first, second = generator.normal(6.1, 0.05, ROUNDS), generator.normal(10, 0.05, ROUNDS)
    calm = paired_ratio(first, second)
    first[4] *= 5
    disturbed = paired_ratio(first, second)
    assert disturbed.value == pytest.approx(calm.value, rel=0.005)
    assert disturbed.high - disturbed.low < 2 * (calm.high - calm.low)


@pytest.mark.parametrize("tails", [False, True])
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(tails):
    generator, held, trials = np.random.default_rng(1), 0, 2000
    for _ in range(trials):
        drift = 1 + 0.2 * np.sin(np.arange(ROUNDS) / 3 + generator.uniform(0, 6))
        scatter = generator.standard_t(2, (2, ROUNDS)) if tails else generator.normal(size=(2, ROUNDS))
        first, second = drift * np.exp(0.02 * scatter)
        found = paired_ratio(6.1 * first, 10 * second)
        held += found.low <= 0.61 <= found.high
    # 90 % of 2000 is 1800, with a standard deviation of 13.
    assert 1760 <= held <= 1840


def test_targets_take_turns_and_each_begins_a_round_as_often():
    clock, log = Clock(), []
    alone = BenchOptions(seconds=1.0, warm_up=0.0, min_runs=2, transfers=False)
    run([constant(name, 30.0, clock, log=log) for name in "abc"], alone)
    # After a warm-up each, 3 runs in each slice of 50 ms.
    assert "".join(name for name, _ in log[3:30:3]) == "abcbcacab"
    log.clear()
    run([constant(name, 9.0, clock, log=log) for name in "ab"], alone)
    slices = [name for index, (name, _) in enumerate(log) if index == 0 or log[index - 1][0] != name]
    # A warm-up each, then a slice each in the rounds: a b, b a, a b ...
    assert slices[: 2 + ROUNDS] == list("ab" * (1 + ROUNDS // 2))
    # A slice of 50 ms holds 6 runs of 9 ms after one that is not counted.
    assert [name for name, _ in log[2:30]] == list("a" * 7 + "b" * 14 + "a" * 7)


def test_the_first_run_of_a_turn_is_not_counted():
    clock, log = Clock(), []

    def takes(context: Script, transfers: bool) -> float:
        cold = len(log) > 1 and log[-2][0] != context.owner.name
        return 50.0 if cold else 2.0

    pair = [target(Scripted(name, takes, clock, log)) for name in "ab"]
    done = run(pair, BenchOptions(seconds=1.0, warm_up=0.0, min_runs=2, transfers=False))
    for one in done.targets:
        assert (one.points[0].latency_ms.shortest, one.points[0].latency_ms.longest) == (2.0, 2.0)


def test_what_ran_before_it_was_warm_is_not_counted():
    clock = Clock()

    def takes(context: Script, transfers: bool) -> float:
        return max(5.0, 50.0 - len(context.owner.log))

    done = run([target(Scripted("a", takes, clock))], BenchOptions(seconds=1.0, warm_up=0.5, transfers=False))
    (point,) = done.targets[0].points
    assert point.warm_up.settled
    assert point.warm_up.seconds > 0.5
    assert (point.latency_ms.longest, point.latency_ms.stddev) == (5.0, 0.0)
    assert done.warnings == ()


def test_a_target_that_does_not_settle_is_a_warning():
    clock = Clock()
    growing = target(Scripted("a", lambda context, transfers: 1.0 + len(context.owner.log) / 10, clock))
    done = run([growing], BenchOptions(seconds=0.1, warm_up=0.5, min_runs=2))
    point = done.targets[0].points[0]
    assert not point.warm_up.settled
    assert point.warm_up.seconds >= 1.5
    assert done.warnings == (
        "'a' had not settled within 1.5 s of warm-up at batch 1; give a longer --warm-up, or a quieter machine",
    )


def test_without_a_warm_up_the_result_says_so():
    assert "there was no warm-up" in run([constant("a", 1.0, Clock())]).warnings[0]


def test_transfers_are_timed_apart():
    clock = Clock()
    done = run([target(Scripted("a", lambda context, transfers: 3.0 if transfers else 2.0, clock))])
    (one,) = done.targets
    assert one.transfers == "included"
    assert one.points[0].latency_ms.p50 == 3.0
    assert one.points[0].compute_ms.p50 == 2.0
    assert one.points[0].transfers_ms == 1.0
    assert one.points[0].throughput[0].images_per_second == pytest.approx(1000 / 3)
    assert "p50 without transfers" in done.table().text()


def test_what_is_timed_without_transfers_is_the_work_and_its_rate_is_that_of_whole_runs(monkeypatch):
    """A context computes twice for a time of the work alone, which the number of images a second must not see."""
    clock = Clock()
    monkeypatch.setattr(Script, "compute", lambda context: context.run(False) + context.run(False) - 5.0)
    for transfers in (True, False):
        options = BenchOptions(seconds=1.0, warm_up=0.0, min_runs=2, transfers=transfers)
        (point,) = run([constant("a", 4.0, clock)], options).targets[0].points
        work = point.compute_ms if transfers else point.latency_ms
        assert work is not None
        assert work.p50 == 3.0
        assert point.throughput[0].images_per_second == pytest.approx(250)
        assert not transfers or point.latency_ms.p50 == 4.0


def test_a_target_without_cuda_graphs_is_a_warning():
    one = constant("a", 4.0, Clock())
    one.runner.run_info = RunInfo("a device of paper", "a library of paper", without_graphs="it loops")
    (said,) = run([one], BenchOptions(seconds=0.1, warm_up=0.1)).warnings
    assert said.startswith("'a' ran without CUDA graphs, as it loops: ")


def test_transfers_are_left_out_where_they_are_not_wanted():
    clock = Clock()
    only = target(Scripted("a", lambda context, transfers: 3.0 if transfers else 2.0, clock))
    done = run([only], BenchOptions(seconds=1.0, warm_up=0.0, transfers=False))
    assert all(not transfers for _, transfers in only.runner.log)  # type: ignore[attr-defined]
    point = done.targets[0].points[0]
    assert (point.latency_ms.p50, point.compute_ms, point.transfers_ms) == (2.0, None, None)
    assert done.targets[0].transfers == "excluded"
    assert done.table().text().startswith("Latency of one run, ms without transfers")


@pytest.mark.parametrize(("seconds", "least", "runs"), [(1.0, 2, 100), (0.001, 100, 100), (1.0, 1000, 1000)])
def test_as_long_and_as_often_as_was_asked(seconds, least, runs):
    options = BenchOptions(seconds=seconds, warm_up=0.0, min_runs=least)
    done = run([constant("a", 10.0, Clock())], options)
    # ROUNDS slices, each with whole runs
    assert runs <= done.targets[0].points[0].latency_ms.runs <= runs + ROUNDS


def test_ratios_refer_to_the_baseline():
    clock = Clock()
    targets = [constant(name, ms, clock) for name, ms in (("int8", 6.1), ("fp16", 10.0), ("fp32", 20.0))]
    done = run(targets, baseline=1)
    assert done.baseline == "fp16"
    ratios = [one.points[0].ratio for one in done.targets]
    assert ratios[1] is None
    assert [one and one.value for one in ratios] == [pytest.approx(0.61), None, pytest.approx(2.0)]
    rates = [one.points[0].throughput[0].ratio for one in done.targets]
    assert [one and one.value for one in rates] == [pytest.approx(10 / 6.1), None, pytest.approx(0.5)]
    rows = [line for line in done.table().markdown().splitlines() if line.startswith("| int8")]
    assert "| 0.610 (0.610 .. 0.610) |" in rows[0]


def test_a_baseline_named_by_path_is_measured_as_well(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(
        latency, "open_targets", lambda paths, config: [constant(str(one), 1.0, clock) for one in paths]
    )
    seen: dict[str, Any] = {}

    def measured(targets: Sequence[Target], options: BenchOptions, baseline: int, progress: Any) -> Any:
        seen.update(names=[one.name for one in targets], baseline=baseline)

    monkeypatch.setattr(latency, "measure", measured)
    bench([Path("a"), Path("b")], baseline=Path("c"))
    assert seen == {"names": ["a", "b", "c"], "baseline": 2}
    bench([Path("a"), Path("b")], baseline=Path("b"))
    assert seen == {"names": ["a", "b"], "baseline": 1}
    bench([Path("a"), Path("b")])
    assert seen["baseline"] == 0
    with pytest.raises(ConfigError, match="nothing to measure"):
        bench([])


def test_contexts_run_at_the_same_time():
    clock, gate = Clock(), threading.Barrier(3, timeout=20)
    met: list[int] = []

    def takes(context: Script, transfers: bool) -> float:
        # Passes only once three contexts are in it together; the first run of each turn is where they wait.
        if threading.current_thread() is not threading.main_thread() and context.number not in met:
            gate.wait()
            met.append(context.number)
        return 1.0

    run([target(Scripted("a", takes, clock))], BenchOptions(streams=(3,), seconds=0.1, warm_up=0.0, min_runs=2))
    assert sorted(met) == [0, 1, 2]


def test_rates_of_contexts_are_added():
    clock = Clock()
    unequal = target(Scripted("a", lambda context, transfers: (2.0, 4.0)[context.number], clock))
    options = BenchOptions(batches=(4,), streams=(1, 2), seconds=1.0, warm_up=0.0, min_runs=2)
    one, two = run([unequal], options).targets[0].points[0].throughput
    assert (one.streams, two.streams) == (1, 2)
    assert one.images_per_second == pytest.approx(4 * 500)
    assert two.images_per_second == pytest.approx(4 * (500 + 250))


@pytest.mark.parametrize(("streams", "runs"), [(3, 100), (2, 0)], ids=["later", "at once"])
def test_a_context_that_fails_ends_the_others(streams, runs):
    """Also at once, where the others wait for it to begin."""
    clock = Clock()

    def takes(context: Script, transfers: bool) -> float:
        if context.number == 1 and len(context.owner.log) > runs:
            raise BackendError("the device is gone")
        return 1.0

    with pytest.raises(BackendError, match="the device is gone"):
        run([target(Scripted("a", takes, clock))], BenchOptions(streams=(streams,), seconds=1.0, warm_up=0.0))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trtdet-context")]


def test_ctrl_c_ends_contexts_that_would_run_on():
    clock, main = Clock(), threading.main_thread().ident
    assert main is not None

    def takes(context: Script, transfers: bool) -> float:
        runs.append(context.number)
        if context.number == 0 and runs.count(0) == 50:
            signal.pthread_kill(main, signal.SIGINT)
        return 1.0

    runs: list[int] = []
    # A test run started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    runner = Scripted("a", takes, clock)
    contexts = [runner.new_context(np.zeros((1, 3, 8, 8), np.float32)) for _ in range(3)]
    try:
        with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor(3, thread_name_prefix="trtdet-context") as pool:
            Slice(0.0, sys.maxsize, clock).runs_per_second(pool, contexts, True)
    finally:
        signal.signal(signal.SIGINT, before)
    # A thread that was being started when the signal came is not the pool's yet: nobody has waited for it.
    left = [one for one in threading.enumerate() if one.name.startswith("trtdet-context")]
    for thread in left:
        thread.join(20)
    assert not [thread for thread in left if thread.is_alive()]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"batch": 1}, "'b' takes batches of exactly 1, got --batch 8"),
        ({"largest_batch": 4}, "'b' takes at most 4 images at once, got --batch 8"),
    ],
)
def test_a_batch_that_a_target_does_not_take(more, said):
    clock, log = Clock(), []
    pair = [constant("a", 1.0, clock, log=log), constant("b", 1.0, clock, log=log, **more)]
    with pytest.raises(ConfigError, match=said):
        run(pair, BenchOptions(batches=(1, 8)))
    assert log == []
    assert pair[0].runner.contexts == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(("fixed", "batch"), [([4, None], 4), ([4, 4], 4), ([None, None], 1)])
def test_the_fixed_batch_is_the_default(fixed, batch):
    clock = Clock()
    done = run([constant(str(index), 1.0, clock, batch=one) for index, one in enumerate(fixed)])
    assert [point.batch for one in done.targets for point in one.points] == [batch] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": (0,)}, "--batch takes distinct numbers from 1 up, got 0"),
        ({"batches": (8, 8)}, "--batch takes distinct numbers from 1 up, got 8 8"),
        ({"streams": (0,)}, "--streams takes distinct numbers"),
        ({"streams": ()}, "--streams takes at least one"),
        ({"seconds": 0.0}, "--seconds must be above 0, got 0"),
        ({"seconds": float("nan")}, "--seconds must be above 0, got nan"),
        ({"warm_up": -1.0}, "--warm-up must be 0 or more"),
        ({"min_runs": 1}, "--min-runs must be at least 2, got 1"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        BenchOptions(**options)


def test_noise_is_the_same_each_time_and_has_the_range_of_pixels(shapes):
    first = shapes.pixels(3, None, 7)
    assert (first.shape, first.dtype) == ((3, 3, 256, 256), np.float32)
    assert np.array_equal(first, shapes.pixels(3, None, 7))
    assert not np.array_equal(first, shapes.pixels(3, None, 8))
    assert not np.array_equal(first[0], first[1])
    assert (first.min(), first.max()) == (0, 255)


def test_images_are_repeated_where_there_are_too_few(shapes, tmp_path):
    for index in range(2):
        Image.new("RGB", (256, 256), (40 * index + 40,) * 3).save(tmp_path / f"{index}.png")
    found = shapes.pixels(5, tmp_path, 0)
    assert [float(one[0, 0, 0]) for one in found] == [40, 80, 40, 80, 40]
    assert [float(one[0, 0, 0]) for one in shapes.pixels(1, tmp_path, 0)] == [40]
    with pytest.raises(DataError, match="does not exist"):
        shapes.pixels(1, tmp_path / "none", 0)


def test_a_target_named_twice_has_two_names(shapes):
    names = [one.name for one in open_targets([SHAPES_MODEL, SHAPES_MODEL, SHAPES_MODEL], CONFIG)]
    assert names == [str(SHAPES_MODEL), f"{SHAPES_MODEL} #2", f"{SHAPES_MODEL} #3"]


def test_a_configuration_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--config is for models"):
        open_targets([tmp_path], CONFIG)


def test_on_the_cpu_nothing_is_transferred(shapes):
    assert isinstance(shapes.runner, OnnxRunner)
    done = measure([shapes], BenchOptions(seconds=0.001, warm_up=0.0, min_runs=2))
    (one,) = done.targets
    assert (one.transfers, one.points[0].compute_ms, one.points[0].transfers_ms) == (None, None, None)
    assert one.points[0].latency_ms.shortest > 0
    assert str(one.run_info) == "onnxruntime (CPU)"
    assert done.as_dict()["targets"][0]["points"][0]["transfers_ms"] is None


@pytest.mark.parametrize(
    "use", [lambda runner, images: runner.new_context(images), lambda runner, images: runner.profile(images, 2, 1)]
)
def test_onnxruntime_takes_the_batch_of_its_model_alone(shapes, use):
    with pytest.raises(BackendError, match="batches of exactly 1, got 2 images"):
        use(shapes.runner, shapes.pixels(2, None, 0))


def test_a_busy_machine_is_a_warning(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.9, 9.0, 9.0))
    options = BenchOptions(seconds=0.1, warm_up=0.1, min_runs=2)
    assert run([constant("a", 1.0, Clock())], options).warnings == ()
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 0.0, 0.0))
    (said,) = run([constant("a", 1.0, Clock())], options).warnings
    assert said.startswith("the machine was busy before it began: load 4.00 on 8 cores")


def test_clocks_are_noted_before_and_after_or_not_known(monkeypatch):
    assert "clocks not known" in run([constant("a", 1.0, Clock())]).table().text()
    readings = iter([{"sm_mhz": 1980}, {"sm_mhz": 1200}])
    one = constant("a", 1.0, Clock())
    monkeypatch.setattr(one.runner, "clocks", lambda: next(readings))
    done = run([one])
    assert "clocks: sm_mhz 1980 before, sm_mhz 1200 after" in done.table().text()
    assert done.as_dict()["machine"]["after"]["clocks"] == {"sm_mhz": 1200}


def test_the_dictionary_of_one_target_has_its_figures_at_the_top():
    done = run([constant("a", 4.0, Clock())], BenchOptions(batches=(8, 16), seconds=0.1, warm_up=0.0, images=None))
    data = json.loads(json.dumps(done.as_dict()))
    assert data["latency_ms"] | {"runs": 0} == {
        **dict.fromkeys(("mean", "p50", "p95", "p99", "shortest", "longest"), 4.0),
        "stddev": 0.0,
        "runs": 0,
    }
    assert data["throughput"] == pytest.approx(2000)
    assert (data["batch"], data["streams"], data["baseline"]) == (8, 1, None)
    assert [point["batch"] for point in data["targets"][0]["points"]] == [8, 16]
    assert data["images"] == "noise of 8-bit pixels, seed 0"
    assert data["machine"]["before"]["cores"] == len(os.sched_getaffinity(0))


def test_the_dictionary_of_several_targets_has_none_at_the_top():
    clock = Clock()
    done = run([constant("a", 4.0, clock), constant("b", 2.0, clock)])
    data = json.loads(json.dumps(done.as_dict()))
    assert "latency_ms" not in data
    assert data["targets"][1]["points"][0]["ratio"] == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5})


def test_a_table_has_a_row_for_each_point_and_each_number_of_streams():
    clock = Clock()
    done = run(
        [constant("a", 4.0, clock), constant("b", 2.0, clock)],
        BenchOptions(batches=(1, 2), streams=(1, 2), seconds=0.1, warm_up=0.0),
    )
    latencies, rates = (part for part in done.table().parts if isinstance(part, Table))
    assert [row[:3] for row in latencies.rows] == [("a", 1, 4.0), ("a", 2, 4.0), ("b", 1, 2.0), ("b", 2, 2.0)]
    assert [row[-1] for row in latencies.rows] == ["1", "1", "0.500 (0.500 .. 0.500)", "0.500 (0.500 .. 0.500)"]
    assert [row[1:3] for row in rates.rows] == [(1, 1), (1, 2), (2, 1), (2, 2)] * 2
    assert rates.notes[0] == "a: engine on a library of paper (a device of paper), NMS native"


def test_progress_reaches_its_end_at_each_stage():
    seen: list[tuple[str, int, int]] = []
    run([constant("a", 1.0, Clock())], progress=lambda *one: seen.append(one))
    ends = [stage for stage, done, total in seen if done == total]
    assert ends == ["batch 1: warming up", "batch 1: latency", "batch 1: throughput, 1 streams"]
