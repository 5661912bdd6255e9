"""What native code prints is kept from standard output within a block, and nothing else is."""

import subprocess
import sys

PROGRAM = """
import ctypes, os
from trtdet.files.native_output import without_native_output
c = ctypes.CDLL(None)
print("before")
c.puts(b"buffered before")
with without_native_output():
    c.puts(b"lost")
    os.write(1, b"lost too\\n")
c.puts(b"buffered after")
c.fflush(None)
print("after")
"""


def test_native_lines_within_the_block_are_lost_and_no_others():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "buffered before", "buffered after", "after"]


def test_without_a_standard_output_the_block_runs():
    program = "import os, sys\nfrom trtdet.files.native_output import without_native_output\nos.close(1)\n"
    program += "with without_native_output():\n    os.write(2, b'ran')\nos._exit(0)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "ran"
