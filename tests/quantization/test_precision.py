import json

import pytest

from trtdet.errors import ConfigError, OutputError
from trtdet.quantization import Cause, Entry, PrecisionPlan, Step

PLAN = PrecisionPlan(
    {
        "Conv_0": Entry("int8", "convolution"),
        "Conv_1": Entry("fp16", "sensitive", Cause.KEPT_SENSITIVE),
        "Conv_2": Entry("int8", "convolution"),
        "Conv_3": Entry("fp32", "its weights are not constant", Cause.WEIGHTS_NOT_CONSTANT),
    }
)


def test_a_plan_counts_and_names_its_nodes():
    assert PLAN.counts() == {"int8": 2, "fp16": 1, "fp32": 1}
    assert PLAN.names("int8") == ("Conv_0", "Conv_2")
    assert PLAN.names("fp16") == ("Conv_1",)
    assert PrecisionPlan({}).counts() == {"int8": 0, "fp16": 0, "fp32": 0}


def test_a_plan_survives_its_file_with_the_order_of_its_nodes(tmp_path):
    path = tmp_path / "new" / "plan.json"
    PLAN.save(path)
    read = PrecisionPlan.load(path)
    assert read == PLAN
    assert list(read.entries) == list(PLAN.entries)


def test_a_plan_as_a_user_reads_it():
    data = json.loads(PLAN.to_json())
    assert data["schema"] == 1
    assert data["entries"]["Conv_1"] == {
        "precision": "fp16",
        "reason": "sensitive",
        "cause": "kept-sensitive",
        "corrections": [],
        "float_output": "",
    }


def test_a_plan_written_before_causes_were_recorded_is_read(tmp_path):
    path = tmp_path / "plan.json"
    steps = [{"name": "bias", "without": 0.5, "error": 0.25}]
    entries = {
        "a": {"precision": "int8", "reason": "x", "corrections": steps},
        "b": {"precision": "fp16", "reason": ""},
    }
    path.write_text(json.dumps({"schema": 1, "entries": entries}))
    assert PrecisionPlan.load(path).entries == {
        "a": Entry("int8", "x", Cause.UNSPECIFIED, (Step("bias", 0.5, 0.25),)),
        "b": Entry("fp16", "", Cause.UNSPECIFIED),
    }


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        (Entry("int8", ""), Cause.QUANTIZABLE),
        (Entry("fp16", ""), Cause.EDITED),
        (Entry("fp16", "", Cause.QUANTIZABLE), Cause.EDITED),
        (Entry("fp16", "", Cause.KEPT_BUDGET), Cause.KEPT_BUDGET),
    ],
)
def test_an_edited_entry_gets_a_cause_and_the_corrections_of_this_build(entry, cause):
    known = Entry("int8", "convolution", Cause.QUANTIZABLE, (Step("bias", 0.5, 0.25),))
    edited = entry.edited_from(known)
    assert edited.cause is cause
    assert edited.corrections == (known.corrections if entry.precision == "int8" else ())


def test_a_plan_cannot_be_written_under_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be written"):
        PLAN.save(tmp_path / "file" / "plan.json")


def test_a_missing_plan_says_where_one_comes_from(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist; start from the plan\.json of a bundle"):
        PrecisionPlan.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"schema": 1}', '{"schema": 1, "entries": []}', '{"a":' * 100_000),
        '{"schema": 1, "entries": {"a": "int8"}}',
        '{"schema": 1, "entries": {"a": {"precision": "int8"}}}',
        '{"schema": 1, "entries": {"a": {"precision": "int8", "reason": "", "why": ""}}}',
        '{"schema": 1, "entries": {"a": {"precision": "int8", "reason": "", "cause": "whim"}}}',
    ],
)
def test_what_is_not_a_plan_is_an_error(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be used .*; start from the plan\.json of a bundle"):
        PrecisionPlan.load(path)
    with pytest.raises(ConfigError, match="cannot be used .*; start from"):
        PrecisionPlan.load(tmp_path)


@pytest.mark.parametrize("precision", ["bf16", "INT8", "", None, 8, ["int8"]])
def test_another_precision_names_the_node_and_the_allowed_ones(tmp_path, precision):
    path = tmp_path / "plan.json"
    entries = {"good": {"precision": "int8", "reason": ""}, "bad": {"precision": precision, "reason": ""}}
    path.write_text(json.dumps({"schema": 1, "entries": entries}))
    with pytest.raises(ConfigError, match="'entries.bad.precision': input should be 'int8', 'fp16' or 'fp32', got"):
        PrecisionPlan.load(path)


@pytest.mark.parametrize("schema", [2, None, "1"])
def test_a_plan_of_another_schema_is_an_error(tmp_path, schema):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(PLAN.to_json()), "schema": schema}))
    with pytest.raises(ConfigError, match="'schema': input should be 1, got"):
        PrecisionPlan.load(path)
