from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real images, annotations and models, which lie beside a checkout and are not part of it."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    if not (folder / "coco").is_dir():
        pytest.skip("needs ../shared/data (COCO images and trained models), which is absent here")
    return folder
