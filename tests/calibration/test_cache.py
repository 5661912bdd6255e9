"""Writing and reading TensorRT's calibration cache, and errors of damaged caches."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtdet.calibration.cache import matched, read, version_number, write
from trtdet.errors import CalibrationError

# Any name of an ONNX tensor but one with a line break: colons, spaces and other separators of lines included.
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), min_size=1)
SCALES = st.floats(np.finfo(np.float32).tiny.item(), np.finfo(np.float32).max.item(), width=32)

# As TensorRT 7.2.3 and 10.13.3 wrote them for published networks.
OWN_7 = (
    "TRT-7203-EntropyCalibration2\ninput_image: 400054a6\nssd_300_vgg/conv_init/Conv2D__176:0: 400054a6\n"
    "(Unnamed Layer* 37) [Constant]_output: 280de15b\n"
)
OWN_10 = (
    "TRT-101303-MinMaxCalibration\n/Sub_output_0: 0\n/Constant_3_output_0_output: 7c010204\n"
    "/encoder/Log_output_0: 7f800000\nlast_hidden_state: 3bc633ee\n"
)


def text(*lines: str) -> str:
    return "\n".join(("TRT-8600-EntropyCalibration2", *lines)) + "\n"


@given(st.dictionaries(NAMES, SCALES), st.integers(0, 10**6))
def test_what_is_written_is_read(scales, version):
    assert list(read(write(scales, version), version=version).items()) == list(scales.items())


@given(st.floats(1e-30, 1e30))
def test_a_scale_is_rounded_to_float32_and_written_big_endian(scale):
    digits = write({"x": scale}, 8600).splitlines()[1].removeprefix("x: ")
    assert digits == f"{np.float32(scale).view(np.uint32):08x}"
    assert read(text(f"x: {digits}"))["x"] == np.float32(scale)


def test_the_text_of_a_known_cache():
    assert write({"data": 1 / 127, "a b: c:0": 2.0}, 8601) == (
        "TRT-8601-EntropyCalibration2\ndata: 3c010204\na b: c:0: 40000000\n"
    )


def test_a_cache_that_tensorrt_wrote_is_read_at_the_last_colon():
    scales = read(OWN_7, version=7203)
    names = ["input_image", "ssd_300_vgg/conv_init/Conv2D__176:0", "(Unnamed Layer* 37) [Constant]_output"]
    assert list(scales) == names
    assert scales["input_image"] == np.array([0x400054A6], np.uint32).view(np.float32)[0]


def test_tensors_that_tensorrt_found_no_range_for_are_refused_or_left_out():
    message = "cache: the scale of 2 of 4 tensors is not over 0.*'/Sub_output_0' with 0"
    with pytest.raises(CalibrationError, match=message):
        read(OWN_10)
    assert list(read(OWN_10, skip_unusable=True)) == ["/Constant_3_output_0_output", "last_hidden_state"]


@pytest.mark.parametrize(
    ("lines", "scales"),
    [
        ("", {}),
        ("\nx: 3f800000", {"x": 1.0}),
        ("\nx: 1000001\n", {"x": np.array([0x01000001], np.uint32).view(np.float32)[0]}),
    ],
)
def test_tensors_leading_zeros_and_the_last_line_break_may_be_left_out(lines, scales):
    assert read(f"TRT-8600-EntropyCalibration2{lines}") == scales


@pytest.mark.parametrize(
    "heading",
    [
        *("", "8600", "TRT-8600", "TRT-x-EntropyCalibration2", " TRT-8600-EntropyCalibration2", "x" * 10_000),
        f"TRT-{'9' * 5000}-EntropyCalibration2",
    ],
)
def test_what_is_no_cache_says_what_its_first_line_is(heading):
    message = "'c.cache' is no calibration cache of TensorRT: its first line is '.*'TRT-"
    with pytest.raises(CalibrationError, match=message) as caught:
        read(heading + "\nx: 3f800000\n", "'c.cache'")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("written", "version", "message"),
    [
        (text("x: 3f800000"), 100900, "is of TensorRT 8600, and 100900 is what will read it.*calibrate again"),
        (OWN_10, 101303, "algorithm MinMaxCalibration, and EntropyCalibration2 is what will read"),
    ],
)
def test_another_version_or_algorithm_is_refused_and_both_are_named(written, version, message):
    with pytest.raises(CalibrationError, match=message):
        read(written, version=version)


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("8.5.3.1", 8503),
        ("8.6.0", 8600),
        ("8.6.1.6", 8601),
        ("9.3.0", 9300),
        ("10.0.0b6", 100000),
        ("10.13.3.9", 101303),
    ],
)
def test_version_numbers_are_nvidias(version, number):
    assert version_number(version) == number


@pytest.mark.parametrize("version", ["", "8.6", "main", "9" * 800 + ".0.0", "8.6." + "9" * 800])
def test_what_is_no_version_is_refused(version):
    with pytest.raises(CalibrationError, match=f"'{version}' is no version of TensorRT"):
        version_number(version)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "x",
        "x:3f800000",
        ": 3f800000",
        "x: ",
        "x: 3f80000g",
        "x: 3f8000000",
        "x: 1.0",
        "x: -3f80000",
        "x: 3f800000\r",
    ],
)
def test_a_malformed_line_is_named_by_its_number(line):
    with pytest.raises(CalibrationError, match="line 3 is '.*', expected the name of a tensor, ': ' and up to 8"):
        read(text("good: 3f800000", line, "also: 3f800000"))


def test_a_name_that_stands_twice_is_refused():
    with pytest.raises(CalibrationError, match="line 4: tensor 'x' stands there twice"):
        read(text("x: 3f800000", "y: 3f800000", "x: 3f800001"))


@pytest.mark.parametrize("digits", ["0", "00000000", "80000000", "bf800000", "7f800000", "ff800000", "7fc00000"])
def test_a_scale_that_is_not_over_0_and_finite_is_refused(digits):
    with pytest.raises(CalibrationError, match="scale of 1 of 2 tensors is not over 0 and finite, the first is 'bad'"):
        read(text("good: 3f800000", f"bad: {digits}"))


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        *(
            ("bad", scale, "scale of tensor 'bad' is .*; it must be a float32 over 0 and finite")
            for scale in (0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-60)
        ),
        ("", 1.0, "no cache holds a tensor named '': empty, or with a line break"),
        ("a\nb", 1.0, r"no cache holds a tensor named 'a\\nb': empty, or with a line break"),
    ],
)
def test_a_scale_or_a_name_that_no_line_holds_is_not_written(name, scale, message):
    with pytest.raises(CalibrationError, match=message):
        write({"good": 1.0, name: scale}, 8600)


def test_scales_come_in_the_order_of_the_network():
    assert list(matched({"b": 1.0, "a": 2.0}, ["a", "other", "b"], ["b"]).items()) == [("a", 2.0), ("b", 1.0)]


@pytest.mark.parametrize(
    ("scales", "network", "message"),
    [
        (["a"], ["a", "b", "c"], "'r' is of another model: 2 of the 3 tensors that need .* none, first 'b'; cal"),
        (["a", "x", "y"], ["a"], "another model: 2 of its 3 tensors are not in the network, first 'x'; cal"),
        (["x"], ["a"], "1 of the 1 tensors .* 'a'; 1 of its 1 tensors .* 'x'; calibrate the model"),
    ],
)
def test_tensors_without_a_scale_and_unknown_ones_are_counted(scales, network, message):
    with pytest.raises(CalibrationError, match=message):
        matched(dict.fromkeys(scales, 1.0), network, network, "'r'")
