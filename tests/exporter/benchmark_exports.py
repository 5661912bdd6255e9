"""The comparison of benchmarks/exports.py, for tests."""

import importlib.util
from pathlib import Path

_PLACE = Path(__file__).parents[2] / "benchmarks" / "exports.py"
_SPEC = importlib.util.spec_from_file_location("exports_benchmark", _PLACE)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
differing = _MODULE.differing
opened = _MODULE.opened
