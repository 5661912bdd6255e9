"""Explicit quantisation: where Q/DQ pairs go, in which precision each convolution runs, and what to watch for."""

from trtdet.quantize.lint import Finding, lint
from trtdet.quantize.placement import Placement, place
from trtdet.quantize.precision import Entry, Precision, PrecisionPlan
from trtdet.quantize.qdq import insert_qdq

__all__ = ["Entry", "Finding", "Placement", "Precision", "PrecisionPlan", "insert_qdq", "lint", "place"]
