"""Reports: text, HTML in a real browser, trace, picture, Prometheus, sinks; of whole and of broken runs."""

import json
import re
import shutil
import urllib.request
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from resources.telemetry.attribution import attribute
from resources.telemetry.causes import Cause
from resources.telemetry.exporter import PrometheusExporter
from resources.telemetry.html_report import render_html
from resources.telemetry.recorder import SPANS_FILE
from resources.telemetry.report import build_report, role_table
from resources.telemetry.sinks import open_sink
from resources.telemetry.spans import RankSpan
from resources.telemetry.text_report import render_text
from resources.telemetry.timeline_image import timeline_data_uri, timeline_svg
from resources.telemetry.trace import write_trace
from resources.telemetry.verdict import judge
from tests.resources.telemetry.scenarios import grader_facts, iteration, run_record, write_run

CHROMIUM = "/usr/bin/chromium"


def engines(begin: float, end: float) -> list[RankSpan]:
    return [
        RankSpan(
            rank=rank,
            start=begin,
            end=end,
            facts={
                "slots": 8,
                "running": [[0.0, 8], [1.0, 5], [2.5, 1], [3.0, 0]],
                "response_length_histogram": {"8": 5, "16": 3},
                "response_length_max": 19,
                "response_length_p50": 9.0,
                "rows": 8,
                "tokens_per_second": 100.0,
            },
        )
        for rank in range(2)
    ]


@pytest.fixture
def slow_grader_run(tmp_path: Path) -> Path:
    """Five iterations with a sleeping grader; metrics and samples beside them."""
    made, now = [], 0.0
    for number in range(5):
        made.append(
            iteration(
                number,
                now,
                seconds={"reward": 4.0},
                facts={"reward": grader_facts([0.5] * 8)},
                ranks={"rollout": engines},
            )
        )
        now = made[-1][1].ended
    write_run(tmp_path, made, run_record())
    lines = [
        json.dumps({"iteration": n, "reward/score_mean": n / 5, "actor/entropy": float("nan") if n == 2 else 1.0})
        for n in range(5)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"iteration": 5, "rew')
    (tmp_path / "samples").mkdir()
    rows = [{"prompt": f"<b>{n}</b> </script>", "response": "x", "score": n / 3} for n in range(4)]
    (tmp_path / "samples" / "0004.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_report_names_the_planted_bottleneck_and_sums_to_the_step(slow_grader_run: Path):
    report = build_report(slow_grader_run)
    assert report.verdict is not None
    assert (report.verdict.role, report.verdict.cause) == ("reward", Cause.SLOW_GRADER)
    assert len(report.complete) == 5
    step = report.iterations[0].times.step_seconds
    for entry in role_table(report):
        total = entry["busy"] + entry["transfer"] + entry["idle"] + sum(entry["waiting"].values())
        assert total == pytest.approx(step, rel=1e-6)
    assert report.length_histogram == {8: 50, 16: 30}
    assert report.metrics["reward/score_mean"][-1] == (4, 0.8)
    assert [iteration for iteration, _ in report.metrics["actor/entropy"]] == [0, 1, 3, 4]
    assert report.missing == ("1 lines of metrics.jsonl could not be read",)
    assert json.loads(json.dumps(report.to_json()))["verdict"]["cause"] == "slow grader"


def test_the_text_form_says_what_to_change(slow_grader_run: Path):
    text = render_text(build_report(slow_grader_run))
    assert "Verdict  reward: slow grader, up to -3" in text.replace("\n", " ")
    assert "reward.processes" in text
    assert re.search(r"reference\s+│\s+0\.50", text)
    assert "\x1b" not in text


def test_the_text_tells_what_went_through_the_controller(tmp_path: Path):
    tasks, span = iteration(0)
    span = replace(span, facts={"controller_bytes": 2048})
    write_run(tmp_path, [(tasks, span)], run_record())
    text = render_text(build_report(tmp_path))
    assert "through the controller: at most 2.0 KiB an iteration" in text


def test_a_run_that_stopped_in_its_first_iteration_has_a_report_without_verdict(tmp_path: Path):
    tasks, _ = iteration(0)
    write_run(tmp_path, [(tasks[:3], None)])
    report = build_report(tmp_path)
    assert report.verdict is None
    assert "no iteration is complete: no verdict on the run" in report.missing
    assert "did not end: last was" in render_text(report)
    render_html(report, tmp_path / "report.html")
    assert "no verdict" in (tmp_path / "report.html").read_text()


def test_an_empty_spans_file_is_reported_as_empty(tmp_path: Path):
    (tmp_path / SPANS_FILE).touch()
    report = build_report(tmp_path)
    assert report.iterations == ()
    render_text(report)
    render_html(report, tmp_path / "report.html")


def test_only_the_last_attempt_of_an_iteration_counts(tmp_path: Path):
    first = iteration(0, seconds={"reward": 40.0})
    write_run(tmp_path, [first, iteration(0, 100.0, attempt=2)], run_record())
    report = build_report(tmp_path)
    assert [(s.times.iteration, s.times.attempt) for s in report.iterations] == [(0, 2)]
    assert any("1 iterations were run again" in note for note in report.missing)


def test_the_page_holds_no_address_and_escapes_what_models_write(slow_grader_run: Path):
    path = slow_grader_run / "report.html"
    render_html(build_report(slow_grader_run), path)
    page = path.read_text()
    addresses = {
        address for address in re.findall(r"https?://[^\s\"'`)]+", page) if not address.startswith("http://www.w3.org/")
    }
    assert addresses == set()
    assert "<b>0</b>" not in page
    assert page.count("</script>") == 2


def test_the_page_opens_in_chromium_without_an_error_or_a_request(slow_grader_run: Path):
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"no browser at {CHROMIUM} (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install -e '.[dev]')"
    )
    path = slow_grader_run / "report.html"
    render_html(build_report(slow_grader_run), path)
    errors: list[str] = []
    requests: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#tail .main-svg")
        charts = page.locator(".chart .main-svg:first-child").count()
        page.fill("#search", "<b>3")
        found = page.text_content("#found")
        page.fill("#search", "")
        page.click("#rows th:has-text('score')")
        page.click("#rows th:has-text('score')")
        first_score = page.text_content("#rows tr:nth-child(2) td:nth-child(3)")
        browser.close()
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert charts >= 6
    assert found == " 1 of 4"
    assert first_score == "1"


def test_the_trace_has_an_event_for_every_rank_and_the_running_sequences(slow_grader_run: Path):
    path = slow_grader_run / "trace.json"
    count = write_trace(slow_grader_run, path, first=1, last=2)
    trace = json.loads(path.read_text())["traceEvents"]
    assert len(trace) == count
    complete = [event for event in trace if event["ph"] == "X"]
    # each of two iterations: itself, nine tasks, ten ranks (two engines)
    assert len(complete) == 2 * (1 + 9 + 10)
    assert {event["name"] for event in trace if event["ph"] == "C"} == {"running 0", "running 1"}
    assert all(event["dur"] >= 0 for event in complete)


def test_the_picture_is_svg_with_a_row_for_each_role():
    tasks, span = iteration()
    timeline, times = attribute(tasks, start=span.started, end=span.ended)
    picture = timeline_svg(timeline, "iteration <0>", list(times.path))
    root = ElementTree.fromstring(picture)
    labels = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rollout", "actor", "critic", "reference", "reward", "advantage", "iteration <0>"} <= set(labels)
    assert timeline_data_uri(timeline).startswith("data:image/svg+xml;base64,")


def test_prometheus_serves_the_last_step_on_loopback_and_frees_its_port():
    tasks, span = iteration(seconds={"reference": 4.0})
    timeline, times = attribute(tasks, start=span.started, end=span.ended)
    with PrometheusExporter() as exporter:
        exporter.publish(times, judge(timeline), {"reward/score_mean": 0.5})
        address = f"http://127.0.0.1:{exporter.port}/metrics"
        with urllib.request.urlopen(address, timeout=10) as answer:
            body = answer.read().decode()
        with pytest.raises(OSError, match=r"port \d+ of 127\.0\.0\.1 is not free .* telemetry\.prometheus_port"):
            PrometheusExporter(exporter.port)
        port = exporter.port
    assert 'callsheet_role_seconds{part="busy",role="reference"} 4.0' in body
    assert 'callsheet_bottleneck{cause="slow reference pool",role="reference"}' in body
    assert 'callsheet_metric{name="reward/score_mean"} 0.5' in body
    with PrometheusExporter(port):
        pass


def test_an_unknown_sink_and_a_missing_extra_say_the_way_out(tmp_path: Path):
    with pytest.raises(ValueError, match=r"telemetry\.sinks has 'carrier-pigeon'; known are"):
        open_sink("carrier-pigeon", tmp_path)
    try:
        import mlflow  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install -e '\.\[sinks\]'"):
            open_sink("mlflow", tmp_path)
