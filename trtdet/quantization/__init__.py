"""Quantisation: where Q/DQ pairs go, in which precision each convolution runs, and what is corrected."""

from trtdet.quantization.corrections import CORRECTIONS, DEFAULT_CORRECTIONS, correct, judged_beside
from trtdet.quantization.corrections.head_ranges import HeadRange, Start, sense
from trtdet.quantization.corrections.policies import Corrected
from trtdet.quantization.defaults import default_plan, left_by_default
from trtdet.quantization.encoding import LARGEST, SMALLEST_NORMAL
from trtdet.quantization.graph_check import lint
from trtdet.quantization.half import nodes_of, tensors_of, to_half
from trtdet.quantization.head_error import HeadError
from trtdet.quantization.implicit import Quantizable, quantizable
from trtdet.quantization.network_forms import CANDIDATES, NetworkForm
from trtdet.quantization.pair_check import PairProblem
from trtdet.quantization.placement import QdqPlacement, place
from trtdet.quantization.plugin_fusion import Requantized, reach, requantize
from trtdet.quantization.precision import Cause, Entry, Format, Precision, PrecisionPlan, Step
from trtdet.quantization.qdq import Corrections, insert_qdq
from trtdet.quantization.quantized_input import OwnScales, QuantizedInput, take_apart
from trtdet.quantization.shared_scales import quantized_joins, shared
from trtdet.quantization.sources import Sources
from trtdet.quantization.switch import Switch
from trtdet.quantization.weight_forms import DataFlow, WeightForm, WeightScales
from trtdet.quantization.weighted import CONVOLUTIONS, LAYERS, PRODUCTS

__all__ = [
    "CANDIDATES",
    "CONVOLUTIONS",
    "CORRECTIONS",
    "DEFAULT_CORRECTIONS",
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
    "HeadError",
    "HeadRange",
    "NetworkForm",
    "OwnScales",
    "PairProblem",
    "Precision",
    "PrecisionPlan",
    "QdqPlacement",
    "Quantizable",
    "QuantizedInput",
    "Requantized",
    "Sources",
    "Start",
    "Step",
    "Switch",
    "WeightForm",
    "WeightScales",
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
    "take_apart",
    "tensors_of",
    "to_half",
]
