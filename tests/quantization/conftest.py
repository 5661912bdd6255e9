import nets
import numpy as np
import pytest
from graphs import inferred, measured_ranges, undone_weights

net = pytest.fixture(lambda: inferred, name="net")
normal = pytest.fixture(lambda: nets.normal, name="normal")
undone = pytest.fixture(lambda: undone_weights, name="undone")
measured = pytest.fixture(lambda: measured_ranges, name="measured")


@pytest.fixture
def images():
    """One image of the size that ``attention_detector`` reads."""
    return np.random.default_rng(0).uniform(0, 255, (1, 3, 128, 128)).astype(np.float32)
