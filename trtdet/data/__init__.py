"""Images and annotations from disk: find them, stream them in batches, read COCO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtdet import importer

if TYPE_CHECKING:
    from trtdet.data.coco import CocoDataset, CocoImage, GroundTruth
    from trtdet.data.folders import IMAGE_SUFFIXES, content_hash, evenly, find_images
    from trtdet.data.stream import ImageBatch, ImageCache, ImageStream

__all__ = [
    "IMAGE_SUFFIXES",
    "CocoDataset",
    "CocoImage",
    "GroundTruth",
    "ImageBatch",
    "ImageCache",
    "ImageStream",
    "content_hash",
    "evenly",
    "find_images",
]

__getattr__ = importer(
    __name__,
    {
        "coco": "CocoDataset CocoImage GroundTruth",
        "folders": "IMAGE_SUFFIXES content_hash evenly find_images",
        "stream": "ImageBatch ImageCache ImageStream",
    },
)
