"""An idle machine, and the shipped detector as a target."""

import os

import pytest

from trtdet.config import load_config
from trtdet.exporter import SHAPES_MODEL
from trtdet.performance import open_targets


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture(scope="session")
def shapes():
    (opened,) = open_targets([SHAPES_MODEL], load_config("shapes"))
    return opened
