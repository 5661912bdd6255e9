"""Quantisation: where Q/DQ pairs go, in which precision each convolution runs, and what is corrected."""

from trtdet.quantization.activation_ranges import reach
from trtdet.quantization.corrections import (
    CORRECTIONS,
    DEFAULT_CORRECTIONS,
    EFFORTS,
    Corrected,
    HeadRange,
    Sources,
    Start,
    correct,
    judged_beside,
    sense,
)
from trtdet.quantization.data_flow import DataFlow, WeightForm
from trtdet.quantization.defaults import FEWEST_CHANNELS, default_plan, left_by_default
from trtdet.quantization.encoding import LARGEST, SMALLEST_NORMAL
from trtdet.quantization.graph_check import GraphProblem, lint
from trtdet.quantization.half import nodes_of, tensors_of, to_half
from trtdet.quantization.head_error import HeadError
from trtdet.quantization.implicit import Quantizable, quantizable
from trtdet.quantization.placement import QdqPlacement, place
from trtdet.quantization.plugin_fusion import Requantized, requantize
from trtdet.quantization.precision import Cause, Entry, Format, Precision, PrecisionPlan, Step
from trtdet.quantization.qdq import Corrections, insert_qdq
from trtdet.quantization.shared_scales import quantized_joins, shared
from trtdet.quantization.switch import Switch
from trtdet.quantization.weight_forms import WeightScales
from trtdet.quantization.weighted import CONVOLUTIONS, LAYERS, PRODUCTS, Weighted

__all__ = [
    "CONVOLUTIONS",
    "CORRECTIONS",
    "DEFAULT_CORRECTIONS",
    "EFFORTS",
    "FEWEST_CHANNELS",
    "LARGEST",
    "LAYERS",
    "PRODUCTS",
    "SMALLEST_NORMAL",
    "Cause",
    "Corrected",
    "Corrections",
    "DataFlow",
    "Entry",
    "Format",
    "GraphProblem",
    "HeadError",
    "HeadRange",
    "Precision",
    "PrecisionPlan",
    "QdqPlacement",
    "Quantizable",
    "Requantized",
    "Sources",
    "Start",
    "Step",
    "Switch",
    "WeightForm",
    "WeightScales",
    "Weighted",
    "correct",
    "default_plan",
    "insert_qdq",
    "judged_beside",
    "left_by_default",
    "lint",
    "nodes_of",
    "place",
    "quantizable",
    "quantized_joins",
    "reach",
    "requantize",
    "sense",
    "shared",
    "tensors_of",
    "to_half",
]
