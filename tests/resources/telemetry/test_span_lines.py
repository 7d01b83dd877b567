"""Lines of spans.jsonl whose numbers are none: refused by name, so that nobody who adds them up meets one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resources.telemetry.facts import FACTS
from resources.telemetry.recorder import SPANS_FILE
from resources.telemetry.report import build_report, profile_of_run
from resources.telemetry.span_lines import decode, encode
from resources.telemetry.spans import IterationSpan, RankSpan, TaskSpan
from resources.telemetry.text_report import render_text
from tests.resources.telemetry.scenarios import SECONDS, grader_facts, iteration, run_record

TASK: dict[str, Any] = {
    "iteration": 1, "task": "reward", "started": 0, "ended": 2.5, "waits": {"queue": 0.5}, "collect": {"seconds": 1},
    "dispatch": {"put_seconds": 0.25}, "upstream": ["rollout"], "ranks": [{"rank": 0, "start": 0, "end": 2}],
}  # fmt: skip


def changed(path: str, value: str) -> str:
    """TASK with `value`, as it stands in the JSON, at `path`."""
    record = json.loads(json.dumps(TASK))
    inner: Any = record
    *before, last = [int(word) if word.isdigit() else word for word in path.split(".")]
    for word in before:
        inner = inner[word]
    inner[last] = "HERE"
    return json.dumps(record).replace('"HERE"', value)


@pytest.mark.parametrize("word", ["null", "true", '"1"', "[1]", "1e999", "1" + "0" * 400])
@pytest.mark.parametrize(
    "path",
    [
        "started", "ended", "submitted", "waits.queue", "waits.weights", "dispatch.put_seconds", "dispatch.bytes",
        "collect.seconds", "ranks.0.start", "ranks.0.queue_seconds", "ranks.0.communication_seconds",
        "ranks.0.cpu_seconds",
    ],
)  # fmt: skip
def test_a_field_that_is_no_finite_number_is_refused_by_its_name(path: str, word: str):
    if (path, word) == ("submitted", "null"):
        return  # that is a step nobody submitted
    with pytest.raises(ValueError, match=f"task record: {path} is .*; it is a finite number"):
        decode(changed(path, word))


@pytest.mark.parametrize("path", ["iteration", "attempt", "ranks.0.rank"])
@pytest.mark.parametrize("word", ["null", "1.5", '"1"', "false"])
def test_what_numbers_something_is_a_whole_number(path: str, word: str):
    with pytest.raises(ValueError, match=f"task record: {path} is .*; it is a whole number"):
        decode(changed(path, word))


@pytest.mark.parametrize("path", ["task", "role", "pool", "node", "ranks.0.node", "upstream.0"])
@pytest.mark.parametrize("word", ["null", "3"])
def test_a_name_is_a_text(path: str, word: str):
    with pytest.raises(ValueError, match=f"task record: {path.removesuffix('.0')} is {word.replace('null', 'None')}"):
        decode(changed(path, word))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"record":"iteration","iteration":null,"started":0,"ended":1}', "iteration is None; it is a whole number"),
        ('{"record":"iteration","iteration":0,"started":0,"ended":null}', "ended is None; it is a finite number"),
        ('{"record":"run","cores_per_node":null}', "cores_per_node is None"),
        ('{"record":"run","group_size":"4"}', "group_size is '4'"),
        ('{"record":"run","roles":null}', "roles is None; it is a text"),
        ('{"record":"run","pools":{"main":{"ranks":null}}}', r"pools\.main\.ranks is None"),
        ('{"record":"clock","offsets":{"a":null}}', "clock record: offsets is None; it is a finite number"),
        ('{"record":[]}', r"record \[\] is unknown here"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_records_of_other_kinds_are_looked_at_as_well(line: str, message: str):
    with pytest.raises(ValueError, match=message):
        decode(line)


def test_a_line_whose_numbers_are_whole_reads_as_before():
    assert decode(json.dumps(TASK)) == decode(json.dumps(TASK).encode())
    assert decode(changed("submitted", "null")).submitted is None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_fact_that_was_nan_when_it_was_written_is_left_out_when_it_is_read():
    nan = float("nan")
    rank = RankSpan(rank=0, start=0.0, end=1.0, facts={"weights_seconds": nan, "running": [[0.0, nan]], "slots": 8})
    span = TaskSpan(
        iteration=0, task="t", started=0.0, ended=1.0, ranks=(rank,), facts={"graders": [{"calls": 2, "p50": nan}]}
    )
    read = decode(encode(span))
    assert isinstance(read, TaskSpan)
    assert (read.facts, read.ranks[0].facts) == ({}, {"slots": 8})
    step = decode(
        encode(IterationSpan(iteration=0, started=0.0, ended=1.0, facts={"between_seconds": nan, "own": nan}))
    )
    assert isinstance(step, IterationSpan)
    assert step.facts == {"own": None}


RICH = {
    "tokens": 100.0, "rows": 8, "micro_batches": 2, "peak_memory_bytes": 1, "slots": 8, "running": [[0, 8], [1, 1]],
    "weights_seconds": 0.1, "weights_age_seconds": 0.1, "long_tail_seconds": 1.0, "starved_seconds": 0.1,
    "preemptions": 1, "kv_cache_use_max": 0.99, "decode_steps": 10, "decode_step_seconds": 0.01,
    "decode_token_seconds": 0.001, "response_length_p50": 3, "response_length_max": 19, "response_length_mean": 3.0,
    "response_length_histogram": {"8": 5},
}  # fmt: skip


def ranks(begin: float, end: float) -> list[RankSpan]:
    return [RankSpan(rank=rank, start=begin, end=end, facts=RICH) for rank in range(2)]


def with_null(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: None if key == name else with_null(inner, name) for key, inner in value.items()}
    return [with_null(inner, name) for inner in value] if isinstance(value, list) else value


def test_whichever_fact_is_null_the_report_and_the_profile_of_a_run_are_made(tmp_path: Path):
    graded = {**grader_facts([0.5] * 8), "hidden_seconds": 1.0, "rows": 8}
    tasks, span = iteration(0, seconds={"reward": 2.0}, facts={"reward": graded}, ranks=dict.fromkeys(SECONDS, ranks))
    span = replace(span, facts={"controller_bytes": 1, "between_seconds": 0.1})
    lines = [json.loads(encode(record)) for record in (run_record(), *tasks, span)]
    for name in sorted({*FACTS, "total_seconds", "max_seconds", "calls", "workers"} - {"bytes"}):
        (tmp_path / SPANS_FILE).write_text("".join(json.dumps(with_null(line, name)) + "\n" for line in lines))
        report = build_report(tmp_path)
        assert len(report.complete) == 1, name
        assert not any("could not be read" in note for note in report.missing), name
        assert render_text(report)
        assert profile_of_run(tmp_path).tasks.keys() == SECONDS.keys()
