"""Kills commands while they work."""

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def finish_after_kills(command: Sequence[str], rows: Path, counts: Sequence[int]) -> None:
    """Kills a command each time that its file has so many rows beside the header, then lets it finish."""
    for count in counts:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        limit = time.monotonic() + 120
        while time.monotonic() < limit and process.poll() is None:
            if rows.exists() and len(rows.read_bytes().splitlines()) - 1 >= count:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
