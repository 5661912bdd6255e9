"""ONNX opsets and operators of TensorRT's parser, by version of TensorRT.

The parser accepts a model of any opset silently and reads each operator in the form it knows. For example, that of 8.6
ignores the axes input of ReduceMean from opset 18 on and reduces over all axes. So a model is written in the opset of
the version's documentation. The sources, in onnx/onnx-tensorrt and NVIDIA/TensorRT on GitHub, are in docs/models.md.
"""

from __future__ import annotations

NEWEST = 24
"""The newest opset written for any parser. TensorRT 11.5 reads 25, which only adds two-bit types and windows of
Attention. onnxruntime 1.31, which calibrates, has Swish in 24 only."""

PARSERS = (((10, 15), NEWEST), ((10, 0), 20), ((9, 0), 19), ((0, 0), 17))
"""(first version, newest opset that its parser reads). A version without readable documentation counts with the last
one before it: an opset that is too old does no harm."""

NEVER = (
    *("AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
    *("CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger", "CumProd", "DFT", "Det"),
    *("DynamicQuantizeLinear", "ImageDecoder", "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix"),
    *("Multinomial", "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement", "OptionalHasElement"),
    *("QLinearConv", "QLinearMatMul", "RegexFullMatch", "SequenceAt", "SequenceConstruct", "SequenceEmpty"),
    *("SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss"),
    *("SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer", "Unique"),
)
"""Operators that no version of TensorRT reads, nor TensorRT-RTX 1.7."""

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
"""The first version that reads each operator; earlier versions lack it, though they read its opset."""


def missing_operators(version: tuple[int, int], vc_plugin: bool = True) -> dict[str, str]:
    """The ONNX operators that the parser of a (major, minor) version lacks, each with the reason.

    ``vc_plugin`` tells whether libnvinfer_vc_plugin is installed. For RoiAlign the parser uses ROIAlign_TRT of
    libnvinfer_plugin, but needs the path of libnvinfer_vc_plugin even for engines that are not version-compatible.
    """
    later = {
        op: f"its parser knows the operator from TensorRT {first[0]}{f'.{first[1]}' if first[1] else ''} on"
        for op, first in _SINCE.items()
        if version < first
    }
    if not vc_plugin:
        later["RoiAlign"] = "its parser wants libnvinfer_vc_plugin, which TensorRT's wheels lack and its archives have"
    return {**dict.fromkeys(NEVER, "TensorRT's parser does not know the operator"), **later}
