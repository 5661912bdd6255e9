"""Quantisation: where Q/DQ pairs go, in which precision each convolution runs, and what is corrected."""

from trtdet.quantize.correct import CORRECTIONS, Corrected, Sources, correct
from trtdet.quantize.half import LARGEST, region_of, to_half
from trtdet.quantize.head import HeadError
from trtdet.quantize.implicit import Quantizable, quantizable
from trtdet.quantize.lint import Finding, lint
from trtdet.quantize.placement import CONVOLUTIONS, Placement, place
from trtdet.quantize.precision import Entry, Precision, PrecisionPlan, Step
from trtdet.quantize.qdq import Corrections, insert_qdq
from trtdet.quantize.requantize import Requantized, reach, requantize
from trtdet.quantize.switch import Switch

__all__ = [
    "CONVOLUTIONS",
    "CORRECTIONS",
    "LARGEST",
    "Corrected",
    "Corrections",
    "Entry",
    "Finding",
    "HeadError",
    "Placement",
    "Precision",
    "PrecisionPlan",
    "Quantizable",
    "Requantized",
    "Sources",
    "Step",
    "Switch",
    "correct",
    "insert_qdq",
    "lint",
    "place",
    "quantizable",
    "reach",
    "region_of",
    "requantize",
    "to_half",
]
