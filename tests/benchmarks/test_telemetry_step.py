"""The step whose telemetry is timed: its spans are those that a report reads of a run."""

from pathlib import Path

from benchmarks.telemetry import TASKS
from benchmarks.telemetry_step import one_step, worker_without_model
from configs.load import load_config
from resources.store import BatchStore, StoreView
from resources.telemetry.facts import FACTS
from resources.telemetry.reader import SpanReader
from resources.telemetry.recorder import SPANS_FILE, SpanFile
from tasks.host import HostContext, use_host


def test_the_step_writes_the_nine_tasks_with_what_workers_and_hosts_know_of_them(tmp_path: Path):
    store = StoreView(BatchStore("main"))
    with use_host(HostContext(pool="main", run_id="telemetry", config=load_config("quickstart"), store=store)):
        one_step(3, SpanFile(tmp_path / SPANS_FILE), worker_without_model())
    (record,) = SpanReader(path=tmp_path).iterations()
    tasks = {task.task: task for task in record.tasks}
    assert (record.iteration, set(tasks), record.span is not None) == (3, set(TASKS), True)
    assert {name: task.upstream for name, task in tasks.items()} == {
        name: upstream for name, (_, upstream) in TASKS.items()
    }
    assert [[rank.rank for rank in task.ranks] for task in tasks.values()] == [[0, 1]] * 9
    assert [grader["calls"] for grader in tasks["reward"].facts["graders"]] == [512]
    # 256 rows of 12 tokens, 540,000 parameters, 4 layers of width 128; training is three forward passes
    forward = 256 * 12 * (2 * 540_000 + 2 * 4 * 128 * 12)
    flops = {name: task.ranks[0].facts.get("model_flops") for name, task in tasks.items()}
    assert (flops["reference"], flops["critic-update"], flops["advantage"]) == (forward, 3 * forward, None)
    facts = {name for task in tasks.values() for rank in task.ranks for name in rank.facts}
    assert {"running", "decode_step_seconds", "response_length_p95", "peak_memory_bytes"} <= facts <= set(FACTS)
