import nets
import pytest
from graphs import inferred, measured_ranges, undone_weights

net = pytest.fixture(lambda: inferred, name="net")
normal = pytest.fixture(lambda: nets.normal, name="normal")
undone = pytest.fixture(lambda: undone_weights, name="undone")
measured = pytest.fixture(lambda: measured_ranges, name="measured")
