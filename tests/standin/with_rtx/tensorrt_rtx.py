"""The stand-in as TensorRT-RTX: the same file under its name, which knows by that what it is."""

from pathlib import Path

_FILE = Path(__file__).parent.parent / "tensorrt.py"
exec(compile(_FILE.read_text(encoding="utf-8"), _FILE, "exec"))
