"""Candidate networks of an engine: prepared where the images are, finished where the GPU is.

| module | what |
|---|---|
| ``folder`` | the folder between the two: ONNX files that share their weights, and what each costs in accuracy |
| ``readme`` | the folder's README, with a command of trtexec for each network |
| ``preparing`` | writes the folder; needs images, and no GPU |
| ``finishing`` | times the candidates and writes the bundle of the fastest; needs neither images nor torch |
| ``building`` | both in a row, where one machine has the images and the GPU |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtdet import importer

if TYPE_CHECKING:
    from trtdet.candidates.building import build
    from trtdet.candidates.finishing import Finished, finish, times_table
    from trtdet.candidates.folder import PreparedFolder
    from trtdet.candidates.preparing import prepare

__all__ = ["Finished", "PreparedFolder", "build", "finish", "prepare", "times_table"]

__getattr__ = importer(
    __name__,
    {
        "building": "build",
        "finishing": "Finished finish times_table",
        "folder": "PreparedFolder",
        "preparing": "prepare",
    },
)
