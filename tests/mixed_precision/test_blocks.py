from __future__ import annotations

from collections.abc import Sequence

import onnx
from models import small_detector
from onnx import helper

from trtdet.mixed_precision.blocks import MOST_BLOCKS, blocks_of


def chain(*names: str, skip: Sequence[tuple[str, str]] = ()) -> onnx.ModelProto:
    """Convolutions one after the other; for each pair of ``skip`` a sum adds the first's output to the second's."""
    nodes, last = [], "x"
    for name in names:
        nodes.append(helper.make_node("Conv", [last, "w"], [f"{name}:0"], name))
        last = f"{name}:0"
        for first, second in skip:
            if second == name:
                nodes.append(helper.make_node("Add", [f"{first}:0", last], [f"{name}:sum"], f"{name}:Add"))
                last = f"{name}:sum"
    return helper.make_model(helper.make_graph(nodes, "chain", [], []))


def named(model: onnx.ModelProto, most: int) -> list[str]:
    return [block.name for block in blocks_of(model, [n.name for n in model.graph.node if n.op_type == "Conv"], most)]


def test_every_convolution_is_in_a_single_block_in_the_order_of_the_graph() -> None:
    model = small_detector()
    convs = [node.name for node in model.graph.node if node.op_type == "Conv"]
    for most in range(1, len(convs) + 1):
        found = blocks_of(model, convs[::-1], most)
        assert len(found) == most
        assert [name for block in found for name in block.convs] == convs
        assert len({block.name for block in found}) == most
    assert blocks_of(model, convs) == blocks_of(model, convs, MOST_BLOCKS)
    assert blocks_of(model, ()) == ()


def test_blocks_are_the_modules_that_node_names_tell_of() -> None:
    names = [f"/model.{index}/{part}/conv/Conv" for index in range(3) for part in ("cv1", "m/m.0/cv1", "cv2")]
    assert named(chain(*names), 3) == ["model.0", "model.1", "model.2"]
    dotted = [f"model.{index}.{part}.conv/Conv" for index in range(3) for part in ("cv1", "cv2")]
    assert named(chain(*dotted), 3) == ["model.0", "model.1", "model.2"]
    # A module is no name for a part of it, nor for more than it.
    two = named(chain(*names), 2)
    assert two[1 if two[0] == "model.0" else 0] not in ("model", "model.1", "model.2") or two == ["model.0", "model.1"]
    assert named(chain(*names), 4).count("model.1") + named(chain(*names), 4).count("model.2") >= 1
    assert named(chain("stem/Conv", "/stage/a/Conv", "/stage/b/Conv"), 2) == ["stem", "stage"]


def test_blocks_without_modules_are_named_by_their_ends() -> None:
    assert named(chain(*"abcd"), 2) == ["a .. b", "c .. d"]
    assert named(chain(*"abc"), 3) == ["a", "b", "c"]


def test_a_run_that_feeds_the_next_alone_is_joined_before_a_branch() -> None:
    """With the sum, a feeds b and d, and d has a and c before it: only b and c are a run."""
    assert named(chain(*"abcd"), 3) == ["a .. b", "c", "d"]
    assert named(chain(*"abcd", skip=[("a", "c")]), 3) == ["a", "b .. c", "d"]
