"""The annotated model: it computes what it did, and each node says what is known of it, also to readers that know none
of trtdet's files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from models import SMALL_MODEL
from once import Once

from trtdet.audit import Audit, Layer, Tensor
from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.config import load_config
from trtdet.demo import shapes
from trtdet.errors import ConfigError
from trtdet.passes.provenance import Origin, origin_of
from trtdet.pipeline import BuildOptions, CalibrationOptions, KeepOptions, build
from trtdet.quantization import PrecisionPlan
from trtdet.report.annotation import Times, annotated
from trtdet.report.runs import Run, read_run


def layers_of(bundle: Bundle) -> list[Layer]:
    """As if each convolution were a kernel with the pair on its input, and the first also reformatted."""
    model = onnx.load(bundle.model)
    makers = {name: node for node in model.graph.node for name in node.output}
    half, int8 = Tensor("h", "Half", (1, 8, 4, 4)), Tensor("q", "Int8", (1, 8, 4, 4))
    layers = []
    for name, entry in PrecisionPlan.load(bundle.file("plan.json")).entries.items():
        node = next(node for node in model.graph.node if node.name == name)
        read = int8 if entry.precision == "int8" else half
        pair = [makers[node.input[0]].name] if entry.precision == "int8" else []
        layers.append(Layer(f"{name}_kernel", "conv", (read,), (), (half,), (name, *pair)))
    first = layers[0].onnx[0]
    return [Layer("copy", "Reformat", (half,), (), (int8,), (first,)), *layers]


@pytest.fixture(scope="module")
def bundle(once: Once) -> Path:
    def make(folder: Path) -> None:
        images = shapes.generate(folder, "calibration", 4).images
        calibration = CalibrationOptions("minmax", images=images)
        options = BuildOptions(
            calibration=calibration, correct=(), backend="onnxruntime", keep=KeepOptions(2, num_images=1), int8_all=True
        )
        made = build(SMALL_MODEL, load_config("shapes"), folder / "b", options).bundle
        layers = layers_of(made)
        made.add("audit.json", Audit(8, 2, 0, tuple(layers), (), ()).to_json().encode())

    return once("annotated", make) / "b"


@pytest.fixture(scope="module")
def known(bundle: Path) -> Run:
    return read_run(bundle)


def notes(node: onnx.NodeProto) -> dict[str, str]:
    return {entry.key.removeprefix("trtdet."): entry.value for entry in node.metadata_props}


def by_name(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {node.name: node for node in model.graph.node}


def test_the_model_computes_what_it_did(known: Run) -> None:
    before, after = known.model, annotated(known, Times({}, "measured"))
    assert before is not None
    onnx.checker.check_model(after)
    images = np.random.default_rng(0).random((1, 3, 256, 256), np.float32)
    results = [
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, {model.graph.input[0].name: images}
        )
        for model in (before, after)
    ]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_but_the_notes_is_changed(known: Run) -> None:
    made = annotated(known, Times({}, "measured"))
    assert known.model is not None
    assert made.ir_version == max(10, known.model.ir_version)
    made.ir_version = known.model.ir_version
    for node in made.graph.node:
        del node.metadata_props[:]
        node.ClearField("doc_string")
    assert made == known.model


def test_a_convolution_says_its_plan_its_kernel_its_time_and_its_error(known: Run) -> None:
    plan, ranking = known.plan, known.ranking
    assert plan is not None and ranking is not None
    (first, *_) = plan.entries
    times = Times({"copy": 0.25, f"{first}_kernel": 0.5}, "measured")
    made = by_name(annotated(known, times))
    for name, entry in plan.entries.items():
        found = notes(made[name])
        assert (found["planned"], found["reason"]) == (entry.precision, entry.reason)
        assert found["layer"].endswith(f"{name}_kernel")
        assert ("ms" in found) == (name == first)
        assert made[name].doc_string.splitlines() == [f"{key}: {value}" for key, value in found.items()]
    found = notes(made[first])
    assert (found["layer"], found["ms"]) == (f"copy; {first}_kernel", "0.7500 (measured)")
    assert found["precision"].split("; ")[0] == "reads Half, writes Int8"
    assert int(found["bytes"]) == 128 * (2 + 1) + 128 * (1 + 2 if plan.entries[first].precision == "int8" else 4)
    (worst,) = [layer for layer in ranking.layers if layer.rank == 1]
    assert notes(made[worst.name])["error"].endswith(f"(rank 1 of {len(ranking.layers)})")
    assert f"{worst.distance:.5f} at the head" in notes(made[worst.name])["error"]


def test_q_dq_nodes_are_named_after_the_layers_that_they_are_for(known: Run) -> None:
    made = annotated(known)
    origins, nodes, plan = origin_of(made), by_name(made), known.plan
    assert plan is not None
    pairs = [name for name, origin in origins.items() if origin is Origin.QDQ]
    assert pairs
    for name in pairs:
        found = notes(nodes[name])
        assert found["origin"] == "qdq"
        assert found["for"] and "trtdet/" not in found["for"]
    makers = {tensor: node for node in made.graph.node for tensor in node.output}
    for name in plan.names("int8"):
        for tensor in nodes[name].input[:2]:
            assert name in notes(makers[tensor])["for"]


def test_what_a_node_said_before_stays(known: Run) -> None:
    assert known.model is not None
    own = onnx.ModelProto()
    own.CopyFrom(known.model)
    name = next(iter(known.plan.entries)) if known.plan is not None else ""
    by_name(own)[name].doc_string = "/model.py(7): forward"
    run = Run(known.path, "bundle", bundle=known.bundle)
    vars(run)["model"] = own
    assert by_name(annotated(run))[name].doc_string.endswith("\n\n/model.py(7): forward")


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no bundle: there is no model to annotate"):
        annotated(Run(tmp_path, "sweep"))


def test_the_command_writes_it_with_estimated_or_given_times(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "annotated.onnx"
    assert main(["audit", str(bundle), "--onnx", str(file), "--gpu", "T4", "--batch", "8", "--json"]) == 0
    done = capsys.readouterr()
    assert json.loads(done.out)["onnx"] == str(file)
    assert "nodes annotated, times estimated for T4, batch 8" in done.err
    times = tmp_path / "times.json"
    times.write_text(json.dumps({layer.name: 0.125 for layer in Audit.load(bundle / "audit.json").layers}))
    assert main(["audit", str(bundle), "--onnx", str(file), "--times", str(times)]) == 0
    assert "times measured" in capsys.readouterr().out
    (name, *_) = PrecisionPlan.load(bundle / "plan.json").entries
    assert notes(by_name(onnx.load(file))[name])["ms"] == "0.2500 (measured)"
    assert main(["audit", str(bundle), "--onnx", str(tmp_path / "a.txt")]) == 1
    assert "must end in .onnx" in capsys.readouterr().err
