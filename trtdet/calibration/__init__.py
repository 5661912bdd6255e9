"""Calibration: from images to the range of every activation, with no GPU and the same for every backend."""

from trtdet.calibration.collector import CollectionRequest, collect, collection_key, expose
from trtdet.calibration.histograms import Collection, Histogram
from trtdet.calibration.ranges import ChannelRange, Range, Ranges
from trtdet.calibration.thresholds import RULES

__all__ = [
    "RULES",
    "ChannelRange",
    "Collection",
    "CollectionRequest",
    "Histogram",
    "Range",
    "Ranges",
    "collect",
    "collection_key",
    "expose",
]
