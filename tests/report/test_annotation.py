"""The annotated model: it computes what it did, and each node says what is known of it, also to readers that know none
of trtdet's files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime
import pytest

from trtdet.audit import Audit, Layer, Tensor
from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.errors import ConfigError
from trtdet.passes.provenance import Origin, origin_of
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
def audited(bundle, once):
    def make(folder: Path) -> None:
        shutil.copytree(bundle, folder / "b")
        copied = Bundle(folder / "b")
        copied.add("audit.json", Audit(8, 3, 0, tuple(layers_of(copied)), (), ()).to_json().encode())

    return once("annotated", make) / "b"


@pytest.fixture(scope="module")
def run(audited):
    return read_run(audited)


def notes(node: onnx.NodeProto) -> dict[str, str]:
    return {entry.key.removeprefix("trtdet."): entry.value for entry in node.metadata_props}


def by_name(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {node.name: node for node in model.graph.node}


def test_nothing_but_the_notes_is_changed(run):
    made = annotated(run, Times({}, "measured"))
    onnx.checker.check_model(made)
    onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    assert made.ir_version == max(10, run.model.ir_version)
    made.ir_version = run.model.ir_version
    for node in made.graph.node:
        del node.metadata_props[:]
        node.ClearField("doc_string")
    assert made == run.model


def test_a_convolution_says_its_plan_its_kernel_its_time_and_its_error(run):
    plan, ranking = run.plan, run.ranking
    (first, *_) = plan.entries
    times = Times({"copy": 0.25, f"{first}_kernel": 0.5}, "measured")
    made = by_name(annotated(run, times))
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


def test_q_dq_nodes_are_named_after_the_layers_that_they_are_for(run):
    made = annotated(run)
    origins, nodes, plan = origin_of(made), by_name(made), run.plan
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


def test_what_a_node_said_before_stays(run):
    own = onnx.ModelProto()
    own.CopyFrom(run.model)
    name = next(iter(run.plan.entries))
    by_name(own)[name].doc_string = "/model.py(7): forward"
    changed = replace(run)
    vars(changed)["model"] = own
    assert by_name(annotated(changed))[name].doc_string.endswith("\n\n/model.py(7): forward")


def test_a_run_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no bundle: there is no model to annotate"):
        annotated(Run(tmp_path))


def test_the_command_writes_it_with_estimated_or_given_times(audited, tmp_path, capsys):
    file = tmp_path / "annotated.onnx"
    assert main(["audit", str(audited), "--onnx", str(file), "--gpu", "T4", "--batch", "8", "--json"]) == 0
    done = capsys.readouterr()
    assert json.loads(done.out)["onnx"] == str(file)
    assert "nodes annotated, times estimated for T4, batch 8" in done.err
    times = tmp_path / "times.json"
    times.write_text(json.dumps({layer.name: 0.125 for layer in Audit.load(audited / "audit.json").layers}))
    assert main(["audit", str(audited), "--onnx", str(file), "--times", str(times)]) == 0
    assert "times measured" in capsys.readouterr().out
    (name, *_) = PrecisionPlan.load(audited / "plan.json").entries
    assert notes(by_name(onnx.load(file))[name])["ms"] == "0.2500 (measured)"
    assert main(["audit", str(audited), "--onnx", str(tmp_path / "a.txt")]) == 1
    assert "must end in .onnx" in capsys.readouterr().err
