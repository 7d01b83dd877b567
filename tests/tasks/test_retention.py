"""What the UI is given, and what it loses: artifacts updated in place, old task rows pruned."""

import base64
import json
import re
import threading
import time

import httpx
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterId
from prefect.context import FlowRunContext

from resources.telemetry.spans import TaskSpan
from tasks.artifacts import RunArtifacts, Sample, artifact_key, samples_markdown
from tasks.curve import Series, curve_svg
from tasks.retention import Retention
from tasks.ui_writer import UiWriter


def flow_run_id():
    return FlowRunContext.get().flow_run.id


def task_rows(run_id) -> list:
    with get_client(sync_client=True) as client:
        return client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))


def test_old_iterations_go_by_the_chunk_with_their_task_rows_and_the_newest_stay(prefect_session: None):
    @task
    def work() -> int:
        return 1

    @flow
    def iteration():
        for _ in range(3):
            work()
        return flow_run_id()

    runs = [iteration() for _ in range(4)]
    for _ in range(100):
        if all(len(task_rows(run)) == 3 for run in runs):
            break
        time.sleep(0.1)
    with UiWriter(every_seconds=0.0, after_seconds=0.0) as writer:
        retention = Retention(writer, keep_iterations=1, chunk=2)
        for run in runs:
            retention.ended(run)
    assert [len(task_rows(run)) for run in runs] == [0, 0, 3, 3]
    assert retention.num_pruned == 2
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=runs))
        assert {run.id for run in client.read_flow_runs(flow_run_filter=chosen)} == set(runs[2:])


def test_each_kind_is_one_artifact_however_many_iterations(prefect_session: None):
    @flow
    def training():
        with UiWriter(every_seconds=0.0, after_seconds=0.0) as writer:
            shown = RunArtifacts(writer, "My.Run_1", num_iterations=4, curves=("reward/score_mean",))
            for number in range(3):
                span = TaskSpan(iteration=number, task="rollout", started=1.0, ended=1.5 + number)
                shown.iteration(number, {"reward/score_mean": 0.25 * number}, [span])
            shown.samples([Sample(prompt="2+2=", response="4", score=1.0, iteration=2)])
            shown.verdict("**rollout** limits this run")
        assert writer.num_failed == 0
        return flow_run_id()

    run = training()
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run])))
    by_key = {one.key: one for one in found}
    assert len(found) == 6
    assert set(by_key) == {
        f"my-run-1-{name}" for name in ("progress", "metrics", "role-timings", "learning-curve", "samples", "verdict")
    }
    assert by_key["my-run-1-progress"].data == 75.0
    table = json.loads(by_key["my-run-1-metrics"].data)
    assert [(row["iteration"], row["reward/score_mean"]) for row in table] == [(2, 0.5), (1, 0.25), (0, 0.0)]
    assert json.loads(by_key["my-run-1-role-timings"].data)[0] == {"iteration": 2, "rollout": 2.5}
    image = re.search(r"base64,([^)]*)", str(by_key["my-run-1-learning-curve"].data))[1]
    assert base64.b64decode(image).startswith(b"<svg")


def test_a_newer_write_replaces_one_that_waits(prefect_session: None):
    gate, done = threading.Event(), []
    with UiWriter(every_seconds=0.0, after_seconds=0.0) as writer:
        writer.put("gate", lambda client: gate.wait(10) and None)
        for number in range(3):
            writer.put("table", lambda client, number=number: done.append(number))
        gate.set()
    assert done[-1:] == [2]
    assert len(done) <= 2


def test_an_api_that_fails_is_counted_and_stops_nothing(prefect_session: None):
    def refuse(client) -> None:
        raise httpx.ConnectError("gone")

    done = []
    with UiWriter(every_seconds=0.0, after_seconds=0.0) as writer:
        writer.put("bad", refuse)
        writer.put("good", lambda client: done.append(1))
    assert writer.num_failed == 1
    assert done == [1]


def test_a_response_cannot_break_out_of_its_block():
    text = samples_markdown([Sample(prompt="# big\n```", response="<script>x</script>", score=None, iteration=0)])
    assert text.splitlines() == ["**Iteration 0, unscorable**", "", "    # big", "    ```", "    <script>x</script>"]


def test_keys_are_what_prefect_takes():
    assert artifact_key("--GSM8K qwen2.5!") == "gsm8k-qwen2-5"


def test_a_replayed_iteration_replaces_its_point():
    series = Series(name="x")
    for number, value in [(0, 1.0), (1, 2.0), (2, 3.0), (1, 5.0)]:
        series.add(number, value, most=10)
    assert (series.iterations, series.values) == ([0, 1], [1.0, 5.0])


def test_a_curve_has_a_line_for_each_metric_with_points_inside_its_frame():
    svg = curve_svg(
        [Series(name="a", iterations=[0, 10], values=[0.0, 1.0]), Series(name="<b>", iterations=[5], values=[0.5])]
    )
    assert svg.count("<polyline") == 2
    assert "&lt;b&gt;" in svg
    points = [
        tuple(map(float, pair.split(","))) for line in re.findall(r'points="([^"]+)"', svg) for pair in line.split()
    ]
    assert all(56 <= x <= 628 and 14 <= y <= 246 for x, y in points)
    assert points[0][1] > points[1][1]


def test_a_curve_without_points_is_refused():
    with pytest.raises(ValueError, match="no series has a point"):
        curve_svg([Series(name="a")])
