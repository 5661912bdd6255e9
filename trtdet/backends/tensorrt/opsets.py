"""What TensorRT's ONNX parser reads, by version of TensorRT.

The parser takes a model of any opset without a word and reads each operator in the form that it knows: that of 8.6
does not look at the axes that ReduceMean has as an input from opset 18 on, and reduces over all. So a model is written
in the opset that the version's documentation names. Sources, all of https://github.com/onnx/onnx-tensorrt and
https://github.com/NVIDIA/TensorRT, are in docs/models.md.
"""

from __future__ import annotations

NEWEST = 24
"""The newest opset that is written for any parser. TensorRT 11.5 reads 25, which brought two-bit types and windows of
Attention alone, and onnxruntime 1.31, which calibrates, knows Swish in 24 only."""

PARSERS = (((10, 15), NEWEST), ((10, 0), 20), ((9, 0), 19), ((0, 0), 17))
"""The first version that reads opsets up to so many. Where a version's documentation could not be read, it is counted
with the last before it that could: an opset too old costs nothing."""

NEVER = (
    *("AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
    *("CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger", "CumProd", "DFT", "Det"),
    *("DynamicQuantizeLinear", "ImageDecoder", "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix"),
    *("Multinomial", "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement", "OptionalHasElement"),
    *("QLinearConv", "QLinearMatMul", "RegexFullMatch", "SequenceAt", "SequenceConstruct", "SequenceEmpty"),
    *("SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss"),
    *("SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer", "Unique"),
)
"""Operators that no version reads, TensorRT-RTX 1.7 neither."""

_SINCE = {
    "CastLike": (9, 1),
    "Hardmax": (9, 2),
    "DeformConv": (10, 1),
    "BlackmanWindow": (10, 4),
    "HammingWindow": (10, 4),
    "HannWindow": (10, 4),
    "STFT": (10, 5),
    "Swish": (11, 0),
}
"""Operators of opsets that an older version reads, and the first version that has them."""


def missing_operators(version: tuple[int, int], vc_plugin: bool = True) -> dict[str, str]:
    """The ONNX operators up to that opset that the parser lacks, each with the reason.

    Args:
        version: of TensorRT, major and minor.
        vc_plugin: libnvinfer_vc_plugin is installed. The parser makes a RoiAlign into ROIAlign_TRT of libnvinfer_plugin
            and then wants the path of that other library, whether or not the engine is to be version-compatible.
    """
    later = {
        op: f"its parser knows the operator from TensorRT {first[0]}{f'.{first[1]}' if first[1] else ''} on"
        for op, first in _SINCE.items()
        if version < first
    }
    if not vc_plugin:
        later["RoiAlign"] = "its parser wants libnvinfer_vc_plugin, which TensorRT's wheels lack and its archives have"
    return {**dict.fromkeys(NEVER, "TensorRT's parser does not know the operator"), **later}
