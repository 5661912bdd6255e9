"""Latency and throughput of detectors, measured side by side, and their time by layer."""

from __future__ import annotations

from trtdet.performance.latency import bench, measure
from trtdet.performance.options import BenchOptions, ProfileOptions
from trtdet.performance.profiles import Difference, OnnxNodes, Profile, Share, differences, slower
from trtdet.performance.profiling import Profiling, layer_means, profile, profile_targets
from trtdet.performance.results import Bench, Ratio
from trtdet.performance.targets import Target, open_targets

__all__ = [
    "Bench",
    "BenchOptions",
    "Difference",
    "OnnxNodes",
    "Profile",
    "ProfileOptions",
    "Profiling",
    "Ratio",
    "Share",
    "Target",
    "bench",
    "differences",
    "layer_means",
    "measure",
    "open_targets",
    "profile",
    "profile_targets",
    "slower",
]
