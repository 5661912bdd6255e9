import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtdet.calibration import RULES, ChannelRange, Collection, Histogram, Range, Ranges, cache
from trtdet.calibration.thresholds import percentile
from trtdet.errors import CalibrationError, ConfigError, TrtdetWarning


@pytest.fixture
def collection():
    rng = np.random.default_rng(0)
    histograms = {name: Histogram.of(rng.normal(0, 1, 3000).astype(np.float32)) for name in ("images", "conv/out:0")}
    return Collection(histograms, "key", 5, "sha", "images")


@pytest.fixture
def ranges(collection):
    return Ranges.choose(collection, "minmax")


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rule_is_applied_to_every_activation_and_the_input_keeps_its_range(collection, rule):
    chosen = Ranges.choose(collection, rule)
    assert list(chosen.tensors) == ["images", "conv/out:0"]
    for name, histogram in collection.histograms.items():
        amax = histogram.amax if name == "images" else RULES[rule](histogram)
        assert chosen.tensors[name] == Range(amax, histogram.low, histogram.high)
    assert (chosen.rule, chosen.percent) == (rule, 99.99 if rule == "percentile" else None)
    assert (chosen.key, chosen.images, chosen.images_sha256) == ("key", 5, "sha")


def test_the_percentile_asked_for_is_taken(collection):
    chosen = Ranges.choose(collection, "percentile", 90)
    assert chosen.percent == 90
    assert chosen.tensors["conv/out:0"].amax == percentile(collection.histograms["conv/out:0"], 90)


def test_an_unknown_rule_lists_the_others(collection):
    with pytest.raises(ConfigError, match="no calibration rule 'max'; allowed: minmax, entropy, percentile, mse"):
        Ranges.choose(collection, "max")


@pytest.mark.parametrize("rule", sorted(RULES))
def test_tensors_of_nothing_but_zeros_get_1_and_are_counted_in_a_warning(rule):
    histograms = {
        "used": Histogram.of(np.ones(3, np.float32)),
        "dead": Histogram.of(np.zeros(3, np.float32)),
        "too small for a float32 scale": Histogram.of(np.array([1e-45, 1e-41, 0], np.float32)),
    }
    with pytest.warns(TrtdetWarning, match="2 activations are zero on all calibration images, the first is 'dead'"):
        chosen = Ranges.choose(Collection(histograms, "", 1, "", "images"), rule)
    assert chosen.tensors["dead"] == Range(1.0, 0.0, 0.0)
    assert [entry.amax for entry in chosen.tensors.values()] == [1.0] * 3


def test_ranges_survive_their_file(ranges, tmp_path):
    path = tmp_path / "new" / "ranges.json"
    for saved in (ranges, replace(ranges, inputs={"conv/out:0": ChannelRange((1.0, 2.5), 1e-4)})):
        saved.save(path)
        read = Ranges.load(path)
        assert read == saved
        assert type(read) is Ranges
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert set(data["tensors"]["images"]) == {"amax", "low", "high"}


def altered(ranges: Ranges, path: Path, **changes: Any) -> Path:
    data = {**json.loads(ranges.to_json()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "drop"}))
    return path


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        *((data, "Invalid JSON: ") for data in (b"", b"{", b"\xff\xfe", b"{'a': 1}", b'{"a":' * 100_000)),
        *((data, "Input should be an object") for data in (b"[]", b"3", b"null")),
    ],
)
def test_a_file_that_is_no_json_object_is_one_short_line(tmp_path, data, problem):
    (tmp_path / "r.json").write_bytes(data)
    with pytest.raises(CalibrationError, match=rf"r.json' cannot be used \({problem}.*\); make ranges") as caught:
        Ranges.load(tmp_path / "r.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    with pytest.raises(CalibrationError, match="does not exist; make ranges with 'trtdet calibrate'"):
        Ranges.load(tmp_path / "absent.json")
    with pytest.raises(CalibrationError, match="cannot be used .*; make ranges"):
        Ranges.load(tmp_path)


@pytest.mark.parametrize("more", [{}, {"rule": "drop"}])
def test_another_schema_is_an_error(ranges, tmp_path, more):
    with pytest.raises(CalibrationError, match=r"cannot be used \('schema': input should be 1, got 2\); make ranges"):
        Ranges.load(altered(ranges, tmp_path / "r.json", schema=2, **more))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"schema": "drop"}, "schema"),
        ({"rule": "drop"}, "rule"),
        ({"extra": 1}, "extra"),
        ({"tensors": []}, "tensors"),
        ({"images": "5"}, "images"),
        ({"tensors": {"a": 3}}, "tensors.a"),
        ({"tensors": {"a": {"amax": 1}}}, "tensors.a.low"),
        ({"tensors": {"a": {"amax": 1, "low": 0, "high": 1, "mean": 0}}}, "tensors.a.mean"),
        ({"inputs": {"a": {"amax": [1, 0], "noise": 0}}}, "inputs.a.amax.1"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_named(ranges, tmp_path, changes, place):
    with pytest.raises(CalibrationError, match=rf"cannot be used \('{place}': .*\); make ranges"):
        Ranges.load(altered(ranges, tmp_path / "r.json", **changes))


@pytest.mark.parametrize("amax", [0, -1.0, float("nan"), float("inf"), "1.0", None, [1]])
def test_an_impossible_range_names_the_tensor(ranges, tmp_path, amax):
    path = altered(ranges, tmp_path / "r.json", tensors={"conv": {"amax": amax, "low": 0, "high": 1}})
    with pytest.raises(CalibrationError, match=r"'tensors\.conv\.amax': input should be .*, got .*; make ranges"):
        Ranges.load(path)


def test_the_calibration_cache_has_a_heading_and_the_scale_of_each_tensor(ranges):
    text = ranges.to_calibration_cache(100900)
    assert text.startswith("TRT-100900-EntropyCalibration2\n")
    scales = {name: float(np.float32(entry.amax / 127)) for name, entry in ranges.tensors.items()}
    assert cache.read(text) == scales
