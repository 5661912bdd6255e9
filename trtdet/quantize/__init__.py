"""Explicit quantisation: where Q/DQ pairs go, in which precision each convolution runs, and what is corrected."""

from trtdet.quantize.correct import CORRECTIONS, Corrected, Sources, correct
from trtdet.quantize.lint import Finding, lint
from trtdet.quantize.placement import Placement, place
from trtdet.quantize.precision import Entry, Precision, PrecisionPlan, Step
from trtdet.quantize.qdq import Corrections, insert_qdq

__all__ = [
    "CORRECTIONS",
    "Corrected",
    "Corrections",
    "Entry",
    "Finding",
    "Placement",
    "Precision",
    "PrecisionPlan",
    "Sources",
    "Step",
    "correct",
    "insert_qdq",
    "lint",
    "place",
]
