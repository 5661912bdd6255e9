"""A CUDA device through cuda-python on a stand-in for the driver, and through a stand-in for PyCUDA."""

from dataclasses import replace

import pytest
from engine_programs import CUDA, needs_cuda_python

pytestmark = needs_cuda_python

ROUND_TRIP = """
with gpu.buffer(16) as memory, gpu.pinned((2, 2), np.float32) as there, gpu.pinned((2, 2), np.float32) as back:
    with gpu.stream() as stream, gpu.event() as start, gpu.event() as end:
        there.array[:] = [[1, 2], [3, 4]]
        stream.record(start)
        stream.copy_in(memory, there.array)
        stream.copy_out(back.array, memory)
        stream.record(end)
        stream.wait()
        assert back.array.tolist() == [[1, 2], [3, 4]]
        assert end.since(start) > 0
"""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"driver": False}, "this machine has no CUDA driver"),
        ({"devices": 0}, "this machine's CUDA driver shows no device"),
        (
            {"init": 803},
            "this machine's CUDA driver does not fit: error 803, system has unsupported display driver / cuda driver "
            "combination; update the driver",
        ),
        ({"init": 999}, "this machine's CUDA driver does not start: error 999, unknown error"),
        ({"init": 12345}, "this machine's CUDA driver does not start: error 12345"),
    ],
)
def test_why_there_is_no_device_is_said(machine, settings, said):
    program = CUDA + "print(cuda.devices()); print(cuda.absence()); refused(cuda.open_device)"
    done = machine.python(program, **settings)
    assert done.out.splitlines() == ["()", said, f"{said}; run this on a machine with a CUDA device"]


CAPTURE = "gpu = cuda.open_device()\nwith gpu.stream() as stream: refused(stream.capture, lambda: None)"


@pytest.mark.parametrize(
    ("program", "settings", "start", "end"),
    [
        pytest.param(
            "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; print(cuda.absence())",
            {"devices": 0},
            *("this machine's CUDA driver shows no device ", "(CUDA_VISIBLE_DEVICES is '')"),
            id="hidden devices",
        ),
        pytest.param(
            "print(cuda.devices(), cuda.absence() or 'none', cuda.driver_version())",
            {"sm": 120, "memory": 3 << 30},
            *("(Device(name='Stand-in GPU', sm=120, memory=3221225472, index=0),)", " none 13.0"),
            id="a device",
        ),
        pytest.param(
            *("refused(cuda.open_device, 2)", {"devices": 2}, "no CUDA device 2;", " this machine has 0, 1"),
            id="a device that is not there",
        ),
        pytest.param(
            "sys.modules['cuda.bindings.driver'] = None; refused(cuda.open_device)",
            {},
            "no package to reach the GPU with (pycuda: No module named 'pycuda'; cuda-python: ",
            "); pip install 'trtdet[cuda]' or pip install 'trtdet[pycuda]'",
            id="no package",
        ),
        pytest.param(
            *(CAPTURE, {"old": 1}, "this machine's CUDA driver is older than cuda-python "),
            "update the driver, or install the cuda-python of its CUDA version",
            id="an old driver",
        ),
        pytest.param(
            *(CAPTURE, {"pycuda": True}, "pycuda", " has no CUDA graphs; for them, pip install 'trtdet[cuda]'"),
            id="no graphs",
        ),
        pytest.param(
            "gpu = cuda.open_device(); print(gpu.clocks(), gpu.no_clocks() or 'none missing')",
            {},
            "{'sm_mhz': 1410, 'sm_max_mhz': 1980, 'memory_mhz': 2619, 'memory_max_mhz': 2619, 'temperature_c': 61, ",
            "'power_w': 312.5, 'throttled': ('power limit', 'thermal limit of the software')} none missing",
            id="clocks",
        ),
        pytest.param(
            "clocks = cuda.open_device().clocks(); print(clocks['power_w'], clocks['temperature_c'])",
            *({"no_power": 1}, "None ", "61"),
            id="no power",
        ),
    ],
)
def test_what_is_said_of_a_device(machine, program, settings, start, end):
    said = machine.python(CUDA + program, **settings).out
    assert (said[: len(start)], said[-len(end) - 1 :]) == (start, f"{end}\n")


@pytest.mark.parametrize(("pycuda", "through", "graphs"), [(False, "cuda-python", True), (True, "pycuda", False)])
def test_copies_come_back_and_nothing_is_left(machine, pycuda, through, graphs):
    program = f"{CUDA}gpu = cuda.open_device()\nprint(gpu.through.split()[0], gpu.graphs, gpu.memory())\n{ROUND_TRIP}"
    done = machine.python(program + "gpu.close(); gpu.close(); del stream, start, end; print(alive())", pycuda=pycuda)
    assert done.out == f"{through} {graphs} (1073741824, 1073741824)\n[0, 0, 0, 0, 0, 0]\n"


@pytest.mark.parametrize("pycuda", [False, True])
def test_every_thread_may_use_a_device(machine, pycuda):
    """PyCUDA ends the process at the end of a thread that leaves a context behind."""
    program = (
        CUDA
        + "gpu = cuda.open_device()\ndone = []\ndef work():\n"
        + "".join(f"    {line}\n" for line in [*ROUND_TRIP.strip().splitlines(), "done.append(1)"])
        + "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "for one in threads: one.start()\nfor one in threads: one.join()\nprint(len(done))"
    )
    assert machine.python(program, pycuda=pycuda).out == "4\n"


def test_what_is_captured_runs_when_it_is_launched_and_as_often(machine):
    program = """
gpu = cuda.open_device()
with gpu.buffer(4) as memory, gpu.pinned((1,), np.int32) as there, gpu.pinned((1,), np.int32) as back:
    with gpu.stream() as stream:
        def work():
            stream.copy_in(memory, there.array)
            stream.copy_out(back.array, memory)
        back.array[:] = 7
        with stream.capture(work) as graph:
            stream.wait()
            print(back.array[0])
            for value in (1, 2):
                there.array[:] = value
                stream.launch(graph)
                stream.wait()
                print(back.array[0])
gpu.close()
print(alive())
"""
    assert machine.python(CUDA + program).out.splitlines() == ["7", "1", "2", "[0, 0, 0, 0, 0, 0]"]


def test_a_capture_ends_where_it_fails_and_other_threads_may_allocate_meanwhile(machine):
    program = """
gpu = cuda.open_device()
def allocate():
    gpu.buffer(1).free()
done = []
def from_another_thread():
    thread = threading.Thread(target=lambda: done.append(allocate()))
    thread.start()
    thread.join()
with gpu.stream() as stream:
    refused(stream.capture, allocate)
    stream.capture(from_another_thread).free()
    stream.wait()
assert done == [None]
gpu.close()
print(alive())
"""
    said = machine.python(CUDA + program).out.splitlines()
    assert said == [
        "the CUDA driver refused cuMemAlloc: error 900, operation not permitted when stream is capturing",
        "[0, 0, 0, 0, 0, 0]",
    ]


@pytest.mark.parametrize("pycuda", [False, True])
def test_full_memory_says_how_much_was_asked_and_is_free(machine, pycuda):
    program = CUDA + "gpu = cuda.open_device()\nheld = gpu.buffer(3 << 20)\nrefused(gpu.buffer, 2 << 20)\nheld.free()"
    program += "\ngpu.buffer(2 << 20).free(); refused(gpu.pinned, (3 << 20,), np.uint8)"
    assert machine.python(program, pycuda=pycuda, memory=4 << 20, pinned=1 << 20).out.splitlines() == [
        "Stand-in GPU has no 2.0 MiB of memory left: 1.0 MiB of 4.0 MiB are free; take a smaller batch, or end other "
        "programs that use it",
        "the host cannot lock 3.0 MiB of memory for copies to Stand-in GPU; take a smaller batch",
    ]


@pytest.mark.parametrize("pycuda", [False, True])
def test_a_failed_device_is_named_once_and_lets_go(machine, pycuda):
    program = """
gpu = cuda.open_device()
memory, stream = gpu.buffer(4), gpu.stream()
call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
with gpu.current():
    ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(ctypes.c_void_p(stream.handle), call, None)
refused(stream.wait)
memory.free()
"""
    said = machine.python(CUDA + program, pycuda=pycuda, fault=700).out
    assert said.startswith("the GPU failed at what it ran (cuStreamSynchronize")
    assert "an illegal memory access was encountered" in said
    assert "start the command again" in said


def test_clocks_that_cannot_be_read_say_why(machine, tmp_path):
    (tmp_path / "libcuda.so.1").symlink_to(machine.libraries / "libcuda.so.1")
    without = replace(machine, libraries=tmp_path)
    program = CUDA + "gpu = cuda.open_device(); print(gpu.clocks(), gpu.no_clocks())"
    assert without.python(program).out.startswith("None NVML does not answer: NVML Shared Library Not Found")
    program = "import sys\nsys.modules['pynvml'] = None\n" + program
    assert machine.python(program).out == "None nvidia-ml-py is not installed (pip install 'trtdet[cuda]')\n"


def test_doctor_shows_driver_memory_and_clocks(machine):
    done = machine.trtdet("doctor", "--json")
    assert done.json["devices"] == ["Stand-in GPU, compute capability 8.9, 1.0 GiB"]
    assert done.json["driver"].startswith("CUDA 13.0, through cuda-python ")
    assert done.json["driver"].endswith(", clocks by NVML")
    (tensorrt,) = (check for check in done.json["backends"] if check["name"] == "tensorrt")
    assert tensorrt["ok"], tensorrt
    assert machine.trtdet("doctor", "--json", driver=False).json["driver"] == "this machine has no CUDA driver"
