"""The plugin library: its arithmetic against NumPy, its kernel body on the CPU, and what the built library exports."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

PLUGINS = Path(__file__).resolve().parent.parent.parent / "plugins"
VERSIONS = ("8.6", "10.0", "10.9", "10.16", "11.1")
DTYPES = {"float": np.float32, "half": np.float16, "int8": np.int8}
RNG = np.random.default_rng(7)


def run(*command: object, stdin: bytes | None = None) -> bytes:
    done = subprocess.run([str(word) for word in command], input=stdin, capture_output=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-4000:]
    return done.stdout


def configure(folder: Path, *options: str) -> str:
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} to build the plugin, which is not on PATH")
    return run("cmake", "-S", PLUGINS, "-B", folder, "-DCMAKE_CXX_COMPILER=g++", *options).decode()


@pytest.fixture(scope="session")
def cpu_test(tmp_path_factory):
    """The test program of the arithmetic, built by g++ alone."""
    folder = tmp_path_factory.mktemp("plugins")
    said = configure(folder)
    assert "skipped: no TensorRT headers: give -DTENSORRT_INCLUDE_DIR=" in said
    run("cmake", "--build", folder, "--target", "silu_cpu_test")
    return folder / "silu_cpu_test"


def kernel(
    program: Path,
    x: np.ndarray,
    to: str,
    act: str = "hard_swish",
    channel: tuple[float, float, float] = (1, 1, 0),
    steps: tuple[float, float] = (0, 0),
    tables: bool = False,
    shift: int = 0,
) -> np.ndarray:
    """What the kernel body makes of one channel; it has to choose ``tables`` itself, by the number of values."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    numbers = [np.float32(value).item().hex() for value in (*channel, *steps)]
    form = ("tables" if tables else "elements", shift)
    out = run(program, "kernel", act, names[x.dtype], to, *numbers, *form, stdin=x.tobytes())
    return np.frombuffer(out, DTYPES[to])


def activation(program: Path, x: np.ndarray, act: str) -> np.ndarray:
    return np.frombuffer(run(program, "activation", act, stdin=x.tobytes()), np.float32)


def int8(y: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(y), 0, np.clip(np.rint(y), -128, 127)).astype(np.int8)


def many_floats() -> np.ndarray:
    """Every exponent, both signs, the specials, and many where activations bend: float32 (about 140 000,)."""
    bits = RNG.integers(0, 2**32, 60000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    bits[np.isnan(bits)] = np.nan  # a signalling one warns at every cast
    bend = RNG.uniform(-12, 12, 60000).astype(np.float32)
    deep = RNG.uniform(-120, 120, 20000).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, 3, -3], np.float32)
    return np.concatenate([bits, bend, deep, special])


def test_every_check_of_the_cpu_program_holds(cpu_test):
    assert run(cpu_test).decode().endswith("checks, 0 failures\n")


def test_silu_is_within_four_units_in_the_last_place(cpu_test):
    x = many_floats()
    y = activation(cpu_test, x, "silu")
    exact = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        e = np.exp(-np.abs(exact))
        exact = np.where(exact < 0, exact * e, exact) / (1 + e)
        exact[np.isneginf(x)] = 0
        np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(y[~finite & ~np.isnan(x)], np.float32(exact[~finite & ~np.isnan(x)]))
        # Below the normal numbers exp has lost bits that the product cannot bring back: x steps of a subnormal.
        step = np.maximum(
            np.spacing(np.abs(exact[finite]).astype(np.float32)).astype(np.float64), np.abs(x[finite]) * 2e-45
        )
        assert (np.abs(y[finite] - exact[finite]) / step).max() <= 4


def test_hard_swish_is_what_numpy_computes_step_by_step(cpu_test):
    x = many_floats()
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        gate = np.clip(x / np.float32(6) + np.float32(0.5), np.float32(0), np.float32(1))
        expected = np.where(np.isneginf(x), np.float32(-0.0), x * gate)
    np.testing.assert_array_equal(activation(cpu_test, x, "hard_swish"), expected)


@pytest.mark.parametrize("act", ["silu", "hard_swish"])
@pytest.mark.parametrize("to", list(DTYPES))
@pytest.mark.parametrize("channel", [(1, 1, 0), (0.037, 23.75, -4.5), (0.1, -7.3, 0.3), (3e-3, 1e6, 0.5)])
def test_given_the_activation_every_other_step_is_exactly_numpys(cpu_test, act, to, channel):
    scale, factor, offset = (np.float32(value) for value in channel)
    whole = np.arange(-128, 128).astype(np.int8)
    for x in (whole, np.arange(65536).astype(np.uint16).view(np.float16), many_floats()):
        real = x.astype(np.float32) * scale if x.dtype == np.int8 else x.astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            y = factor * activation(cpu_test, real, act) + offset
            expected = int8(y) if to == "int8" else y.astype(DTYPES[to])
        np.testing.assert_array_equal(kernel(cpu_test, x, to, act, channel), expected)


def test_an_implicitly_quantised_tensor_takes_its_own_steps(cpu_test):
    x = np.arange(-128, 128).astype(np.int8)
    step_in, step_out = np.float32(0.043), np.float32(0.019)
    y = activation(cpu_test, x.astype(np.float32) * step_in, "silu") / step_out
    found = kernel(cpu_test, x, "int8", "silu", (9.0, 1.0, 0.0), (step_in.item(), step_out.item()))
    np.testing.assert_array_equal(found, int8(y))


WHOLE = {"half": np.arange(65536).astype(np.uint16).view(np.float16), "int8": np.arange(-128, 128).astype(np.int8)}
"""Every value of a type, with NaN, infinities, subnormal numbers and -0."""

CHANNELS = {
    "half": [((1, 1, 0), (0, 0)), ((1, 23.75, -4.5), (0, 0)), ((1, -0.37, 1e-3), (0, 0)), ((1, 1, 0), (0, 0.019))],
    "int8": [
        ((0.05, 1, 0), (0, 0)),
        ((0.037, 23.75, -4.5), (0, 0)),
        ((0.1, -7.3, 0.3), (0, 0)),
        ((9, 1, 0), (0.043, 0.019)),
    ],
}
"""Scale, factor and offset of a channel, and the steps of an implicitly quantised network."""

APART = 4
"""Largest distance to double precision beyond the rounding of the output, in steps of the largest float32 term."""


def in_double(
    x: np.ndarray, act: str, channel: tuple[float, float, float], steps: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The formula of ``activation.h`` in float64, with the parameters as float32 holds them, and a float32 step of the
    largest term of its sums. Below the normal numbers, exp has lost bits that its product with x cannot bring back."""
    scale, factor, offset, step_in, step_out = (float(np.float32(value)) for value in (*channel, *steps))
    with np.errstate(over="ignore", invalid="ignore"):
        real = x.astype(np.float64) * ((step_in or scale) if x.dtype == np.int8 else 1)
        gate = 1 / (1 + np.exp(-real)) if act == "silu" else np.clip(real / 6 + 0.5, 0, 1)
        y = factor * np.where(np.isneginf(real), -0.0, real * gate) + offset
        term = np.maximum(np.abs(y), abs(offset)) if act == "silu" else np.abs(factor * real) + abs(offset)
        step = np.maximum(np.spacing(term.astype(np.float32)).astype(np.float64), np.abs(factor * real) * 2e-45)
    return y / (step_out or 1), step / (step_out or 1)


def apart(found: np.ndarray, exact: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Distances beyond half a step of the output's type, in ``step``; NaN and infinity have to be in the same places,
    but in INT8 NaN is 0."""
    if found.dtype == np.int8:
        exact, half = np.where(np.isnan(exact), 0, np.clip(exact, -128, 127)), np.full(exact.shape, 0.5)
        finite = np.ones(exact.shape, bool)
    else:
        with np.errstate(over="ignore"):
            rounded = exact.astype(found.dtype)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
        np.testing.assert_array_equal(found[np.isinf(rounded)], rounded[np.isinf(rounded)])
        finite = np.isfinite(rounded)
        most = np.nextafter(np.finfo(found.dtype).max, found.dtype.type(0))  # the step above the largest is infinite
        half = np.spacing(np.minimum(np.abs(rounded[finite]), most)).astype(np.float64) / 2
    distance = np.abs(found[finite].astype(np.float64) - exact[finite])
    beyond: np.ndarray = np.maximum(distance - half, 0) / np.where(np.isfinite(step), step, 1)[finite]
    return beyond


@pytest.mark.parametrize("act", ["silu", "hard_swish"])
@pytest.mark.parametrize("to", list(DTYPES))
@pytest.mark.parametrize("given", list(WHOLE))
def test_the_kernel_computes_every_half_and_every_integer_as_double_precision_does(cpu_test, act, to, given):
    table = (given, to) == ("int8", "int8")
    for channel, steps in CHANNELS[given]:
        exact, step = in_double(WHOLE[given], act, channel, steps)
        for tables in (False, True)[: 1 + table]:
            # With a tail: no multiple of what a thread moves at once. INT8 to INT8 has tables from 512 values on.
            count = len(exact) if table and not tables else max(len(exact), 1024) + 5
            x, *expected = (np.resize(values, count) for values in (WHOLE[given], exact, step))
            for shift in (0, 1, 3):
                y = kernel(cpu_test, x, to, act, channel, steps, tables=tables, shift=shift)
                assert apart(y, *expected).max() <= APART
                if to != "int8" and channel == (1, 1, 0):
                    np.testing.assert_array_equal(np.signbit(y[x == 0]), np.signbit(x[x == 0] + 0))


@pytest.mark.slow
def test_no_check_of_the_cpu_program_leaves_its_memory(tmp_path):
    configure(tmp_path, "-DCMAKE_CXX_FLAGS=-O0 -fsanitize=address,undefined -fno-sanitize-recover=all")
    run("cmake", "--build", tmp_path, "--target", "silu_cpu_test")
    run(tmp_path / "silu_cpu_test")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_library_compiles_without_a_warning_answers_tensorrt_and_links_none(tmp_path, version):
    if "TRTDET_TENSORRT_HEADERS" not in os.environ:
        pytest.skip("set TRTDET_TENSORRT_HEADERS to a folder that holds VERSION/include/NvInfer.h")
    headers = Path(os.environ["TRTDET_TENSORRT_HEADERS"]) / version / "include"
    if not headers.is_dir():
        pytest.skip(f"TRTDET_TENSORRT_HEADERS holds no {version}/include")
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc on PATH")
    # PTX of one architecture: what is tested here is the host's part, and ptxas takes most of the time.
    said = configure(tmp_path, f"-DTENSORRT_INCLUDE_DIR={headers}", "-DCMAKE_CUDA_ARCHITECTURES=90-virtual")
    plugin = "plugin_v2.cpp" if version == "8.6" else "plugin_v3.cpp"
    assert f"trtdet_plugins: TensorRT {version.split('.')[0]}, silu/{plugin}" in said
    built = subprocess.run(
        ["cmake", "--build", str(tmp_path), "--target", "trtdet_plugins", "plugin_test"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert built.returncode == 0, built.stdout[-4000:]
    assert "warning" not in built.stdout
    library = tmp_path / "libtrtdet_plugins.so"
    run(tmp_path / "plugin_test", library)
    defined = {line.split()[-1] for line in run("nm", "-D", "--defined-only", library).decode().splitlines()}
    entries = {"getPluginCreators", "initTrtdetPlugins"} if version == "8.6" else {"getCreators"}
    assert defined == {"setLoggerFinder", *entries}
    undefined = run("nm", "-D", "--undefined-only", library).decode()
    assert not [name for name in ("nvinfer", "getPluginRegistry", "getLogger", "cuda") if name in undefined]
    needed = run("readelf", "-d", library).decode()
    assert "nvinfer" not in needed and "cudart" not in needed
