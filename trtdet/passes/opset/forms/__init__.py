"""What an operator of a newer opset is in an older one, by operator.

Each form takes the node and what is known around it, and gives nodes that compute the same, or raises
``InexpressibleError``. It is only called where the operator's schema changed between the two opsets, and asks
``scope.crosses`` which of the changes lie between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from trtdet.passes.opset.forms import axes, layers, types
from trtdet.passes.opset.nodes import NodeWriter
from trtdet.passes.opset.scope import Scope

Form = Callable[[NodeWriter, Scope], list[onnx.NodeProto]]

GROUPS = (axes, types, layers)
"""One file a group of operators."""

FORMS: Mapping[str, Form] = {operator: form for group in GROUPS for operator, form in group.FORMS.items()}
