"""Candidate networks of an engine: prepared where the images are, finished where the GPU is.

| module | what |
|---|---|
| ``folder`` | the folder between the two: ONNX files that share their weights, and what each costs in accuracy |
| ``prepare`` | writes the folder; needs images, and no GPU |
| ``finish`` | builds and times the candidates, and writes the bundle of the fastest; needs neither images nor torch |
"""

from trtdet.candidates.finish import Finished, finish
from trtdet.candidates.folder import PreparedFolder
from trtdet.candidates.prepare import prepare

__all__ = ["Finished", "PreparedFolder", "finish", "prepare"]
