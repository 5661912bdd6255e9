"""Activation ranges from calibration images, without a GPU and the same for all backends."""

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
