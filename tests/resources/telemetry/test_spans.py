"""Spans: round trip, clocks, reading what a crash or an older version left."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resources.telemetry.clocks import ClockOffset, RoundTrip, correct_span, estimate_offset
from resources.telemetry.reader import SpanReader
from resources.telemetry.recorder import SPANS_FILE, SpanFile
from resources.telemetry.span_lines import decode, encode
from resources.telemetry.spans import (
    ClockRecord,
    Collect,
    Dispatch,
    IterationSpan,
    PoolRecord,
    RankSpan,
    RunRecord,
    TaskSpan,
    Waits,
)
from tests.resources.telemetry.scenarios import iteration, run_record, write_run

FULL = TaskSpan(
    iteration=4,
    attempt=2,
    task="actor-update",
    role="actor",
    pool="main",
    node="10.0.0.2",
    submitted=1.0,
    started=1.5,
    ended=9.0,
    upstream=("advantage",),
    waits=Waits(queue=0.2),
    dispatch=Dispatch(serialize_seconds=0.1, bytes=12),
    collect=Collect(seconds=0.01, bytes=3),
    ranks=(
        RankSpan(
            rank=0, start=2.0, end=8.0, node="10.0.0.2", forward_seconds=2.0, facts={"tokens": 100, "running": [[0, 1]]}
        ),
    ),
    facts={"policy_version": 3},
)


@pytest.mark.parametrize(
    "record",
    [
        FULL,
        TaskSpan(iteration=0, task="reward", started=0.0, ended=0.0),
        IterationSpan(iteration=1, started=0.0, ended=2.0, facts={"controller_bytes": 7}),
        ClockRecord(offsets={"a": 0.25}, errors={"a": 0.001}),
        RunRecord(
            run="r", cores_per_node=2.0, pools={"main": PoolRecord(ranks=4, accelerator="gpu")}, roles={"actor": "main"}
        ),
    ],
)
def test_a_record_read_back_is_the_record(record: object):
    line = encode(record)  # type: ignore[arg-type]
    assert line.endswith("\n")
    assert "\n" not in line[:-1]
    assert decode(line) == record


def test_a_nan_or_a_numpy_number_among_the_facts_never_ends_a_run():
    facts = {"a": float("nan"), "b": np.float32(0.5), "c": [1.0, float("inf")], "d": np.float32("nan")}
    read_back = decode(encode(IterationSpan(iteration=0, started=0.0, ended=1.0, facts=facts)))
    assert isinstance(read_back, IterationSpan)
    assert read_back.facts == {"a": None, "b": 0.5, "c": [1.0, None], "d": None}


def test_role_facts_stand_beside_the_fields():
    written = json.loads(encode(FULL))
    assert written["policy_version"] == 3
    assert written["ranks"][0]["tokens"] == 100


def test_a_fact_with_the_name_of_a_field_is_refused():
    with pytest.raises(ValueError, match=r"facts \['pool'\] of a TaskSpan have names of its fields"):
        encode(replace(FULL, facts={"pool": "x"}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "a record is a JSON object"),
        ('{"record":"dream"}', "record 'dream' is unknown here"),
        ('{"task":"reward"}', "task record: .*missing"),
        ('{"iteration":1,"task":"x","started":0,"ended":1,"ranks":[3]}', "not as 3"),
    ],
)
def test_a_line_that_is_no_record_says_why(line: str, message: str):
    with pytest.raises(ValueError, match=message):
        decode(line)


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(0, 2**32), st.integers(1, 20))
def test_the_true_clock_offset_lies_within_the_error_of_the_estimate(offset: float, seed: int, count: int):
    source = random.Random(seed)
    trips, now = [], 0.0
    for _ in range(count):
        there, back = source.uniform(0.0, 0.1), source.uniform(0.0, 0.1)
        trips.append(RoundTrip(sent=now, remote=now + there + offset, received=now + there + back))
        now += 1.0
    estimate = estimate_offset(trips)
    assert abs(estimate.seconds - offset) <= estimate.error + 1e-6
    assert estimate.error <= min(trip.received - trip.sent for trip in trips) / 2 + 1e-6


def test_round_trips_that_contradict_each_other_leave_it_to_the_shortest():
    trips = [RoundTrip(sent=0.0, remote=100.0, received=1.0), RoundTrip(sent=10.0, remote=115.1, received=10.2)]
    assert estimate_offset(trips) == ClockOffset(seconds=pytest.approx(105.0), error=pytest.approx(0.1))


def test_no_round_trip_and_a_backward_one_are_refused():
    with pytest.raises(ValueError, match="no round trip was measured"):
        estimate_offset([])
    with pytest.raises(ValueError, match="received before it was sent"):
        estimate_offset([RoundTrip(sent=2.0, remote=0.0, received=1.0)])


@pytest.mark.parametrize("offset", [100.0, -7200.0, 1.5])
def test_an_older_span_comes_onto_the_controllers_clock_whichever_clock_its_ranks_were_told_by(offset: float):
    """Workers told the controller's, which is right as it stands, whatever their node; rollout servers their host's."""
    span = TaskSpan(
        iteration=0, task="t", node="a", submitted=1.0, started=1.0 + offset, ended=4.0 + offset,
        ranks=(
            RankSpan(rank=0, start=2.0, end=3.0),
            RankSpan(rank=1, start=1.0, end=3.5, node="b"),
            RankSpan(rank=2, start=1.0 + offset, end=4.0 + offset),
        ),
    )  # fmt: skip
    corrected = correct_span(span, {"a": offset, "b": 50.0})
    assert (corrected.submitted, corrected.started, corrected.ended) == (1.0, 1.0, 4.0)
    assert [(rank.start, rank.end) for rank in corrected.ranks] == [(2.0, 3.0), (1.0, 3.5), (1.0, 4.0)]
    assert correct_span(span, {"b": 50.0}) is span


def read(folder: Path) -> tuple[SpanReader, list[tuple[int, int, int, bool]]]:
    reader = SpanReader(path=folder)
    return reader, [(r.iteration, r.attempt, len(r.tasks), r.span is not None) for r in reader.iterations()]


def test_a_whole_run_reads_without_a_complaint(tmp_path: Path):
    write_run(tmp_path, [iteration(0), iteration(1, 10.0)], run_record())
    reader, records = read(tmp_path)
    assert records == [(0, 1, 9, True), (1, 1, 9, True)]
    assert reader.missing == ()


def test_a_cut_last_line_costs_that_line_alone(tmp_path: Path):
    write_run(tmp_path, [iteration(0), iteration(1, 10.0)], run_record())
    path = tmp_path / SPANS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    reader, records = read(tmp_path)
    assert records == [(0, 1, 9, True), (1, 1, 9, False)]
    assert any("1 line could not be read (line 21: cut short)" in note for note in reader.missing)


def test_a_resumed_run_appends_on_a_new_line_after_a_cut_one(tmp_path: Path):
    write_run(tmp_path, [iteration(0)], run_record())
    path = tmp_path / SPANS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    SpanFile(path).append(IterationSpan(iteration=5, started=0.0, ended=1.0))
    reader, records = read(tmp_path)
    assert (5, 1, 0, True) in records
    assert any("1 line could not be read" in note for note in reader.missing)


def test_a_run_that_crashed_half_way_says_what_is_missing(tmp_path: Path):
    tasks, _ = iteration(1, 10.0)
    write_run(tmp_path, [iteration(0), (tasks[:4], None)], run_record())
    reader, records = read(tmp_path)
    assert records[-1] == (1, 1, 4, False)
    assert (
        "iteration 1 (attempt 1) did not end: last was reference; not recorded:"
        " critic-values, advantage, critic-update, actor-update, weight-sync"
    ) in reader.missing


def test_a_line_of_noise_in_the_middle_is_stepped_over(tmp_path: Path):
    write_run(tmp_path, [iteration(0)], run_record())
    with (tmp_path / SPANS_FILE).open("ab") as file:
        file.write(b"\x00\xff not json\n\n")
    write_run(tmp_path, [iteration(1, 10.0)])
    _, records = read(tmp_path)
    assert records == [(0, 1, 9, True), (1, 1, 9, True)]


def test_a_run_of_an_older_version_is_read_as_far_as_it_goes(tmp_path: Path):
    old = {
        "iteration": 0,
        "task": "actor_update",
        "started": 0.0,
        "ended": 2.0,
        "ranks": [{"rank": 0, "start": 0.5, "end": 1.5}],
    }
    (tmp_path / SPANS_FILE).write_text(
        json.dumps({"record": "run", "schema": 0})
        + "\n"
        + json.dumps(old)
        + "\n"
        + json.dumps({"record": "iteration", "iteration": 0, "started": 0.0, "ended": 2.0})
        + "\n"
    )
    reader, records = read(tmp_path)
    assert records == [(0, 1, 1, True)]
    assert any("older version (schema 0" in note for note in reader.missing)


def test_a_run_of_a_newer_version_says_that_its_additions_are_ignored(tmp_path: Path):
    write_run(tmp_path, [iteration(0)], run_record(schema=9))
    reader, _ = read(tmp_path)
    assert any("newer version (schema 9" in note for note in reader.missing)


def test_clocks_are_corrected_by_the_record_before_the_spans(tmp_path: Path):
    file = SpanFile(tmp_path / SPANS_FILE)
    tasks, span = iteration(0)
    ahead = [
        replace(
            task,
            node="b",
            started=task.started + 5.0,
            ended=task.ended + 5.0,
            ranks=tuple(replace(r, start=r.start + 5.0, end=r.end + 5.0) for r in task.ranks),
        )
        for task in tasks
    ]
    file.append(run_record(), ClockRecord(offsets={"b": 5.0}, errors={"b": 0.001}), *ahead, span)
    reader = SpanReader(path=tmp_path)
    (record,) = reader.iterations()
    assert [task.ended for task in record.tasks] == pytest.approx([task.ended for task in tasks])
    assert reader.missing == ()


def test_an_older_run_that_a_newer_version_resumed_is_corrected_up_to_there(tmp_path: Path):
    (tasks, span), (later, later_span) = iteration(0), iteration(1, 20.0)
    old = [replace(task, node="b", started=task.started + 7200.0, ended=task.ended + 7200.0) for task in tasks]
    file = SpanFile(tmp_path / SPANS_FILE)
    file.append(run_record(), ClockRecord(offsets={"b": 7200.0}, errors={"b": 0.001}), *old, span)
    file.append(run_record(), *(replace(task, node="b") for task in later), later_span)
    first, second = SpanReader(path=tmp_path).iterations()
    for record, wanted in ((first, tasks), (second, later)):
        assert [task.ended for task in record.tasks] == pytest.approx([task.ended for task in wanted])
        assert [rank.end for task in record.tasks for rank in task.ranks] == [
            rank.end for task in wanted for rank in task.ranks
        ]


def test_clocks_that_differ_without_an_offset_are_reported(tmp_path: Path):
    tasks, span = iteration(0)
    skewed = [
        replace(t, node="b", started=t.started - 2.0, ranks=tuple(replace(r, start=r.start - 2.0) for r in t.ranks))
        if t.task == "reward"
        else replace(t, node="a")
        for t in tasks
    ]
    write_run(tmp_path, [(skewed, span)], run_record())
    reader, _ = read(tmp_path)
    assert reader.missing == (
        "clocks of nodes a and b differ by what no offset accounts for: reward starts 1.99 s before rollout ended;"
        " 1 such overlap is cut",
    )


def test_no_spans_file_says_which_setting_writes_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"telemetry\.enabled: true"):
        read(tmp_path)


def test_a_second_attempt_is_an_iteration_of_its_own(tmp_path: Path):
    first, _ = iteration(0)
    write_run(tmp_path, [(first[:2], None), iteration(0, 20.0, attempt=2)], run_record())
    _, records = read(tmp_path)
    assert sorted(records) == [(0, 1, 2, False), (0, 2, 9, True)]


def test_the_files_own_cpu_time_is_counted(tmp_path: Path):
    file = SpanFile(tmp_path / SPANS_FILE)
    before = time.thread_time()
    for number in range(50):
        file.append(*iteration(number)[0])
    assert 0.0 < file.own_cpu_seconds <= time.thread_time() - before
