"""Images and annotations from disk: find them, stream them in batches, read COCO."""

from __future__ import annotations

from trtdet.data.cache import ImageCache
from trtdet.data.coco import CocoDataset, CocoImage, GroundTruth
from trtdet.data.folders import IMAGE_SUFFIXES, content_hash, evenly, find_images
from trtdet.data.stream import Batch, ImageStream

__all__ = [
    "IMAGE_SUFFIXES",
    "Batch",
    "CocoDataset",
    "CocoImage",
    "GroundTruth",
    "ImageCache",
    "ImageStream",
    "content_hash",
    "evenly",
    "find_images",
]
