"""What a person sees: the Prefect UI in headless Chromium, on a run of two iterations."""

import re
import shutil
from collections.abc import Iterator

import pytest
from prefect import flow
from prefect.context import FlowRunContext

from configs.training import PrefectConfig
from tasks.api import prefect_api, ui_url
from tasks.artifacts import RunArtifacts, Sample
from tasks.collect import collect, spans_of
from tasks.hosts import start_hosts
from tasks.runner import ON_POOLS
from tasks.step import StepResult, step
from tasks.subflow import call_iteration, iteration_run_name
from tasks.ui_writer import UiWriter

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]


@step(role="rollout")
def rollout(policy_version: int) -> StepResult:
    return StepResult(metrics={"reward/score_mean": 0.25 + 0.5 * policy_version})


@step(role="actor")
def actor_update(batch: object, policy_version: int) -> StepResult:
    return StepResult(metrics={"actor/approx_kl": 0.01})


@flow(flow_run_name=iteration_run_name, task_runner=ON_POOLS, persist_result=False)
def iteration(iteration: int, attempt: int):
    sampled = rollout.submit(policy_version=iteration)
    updated = actor_update.submit(sampled, policy_version=iteration)
    results = collect([sampled, updated], 60)
    metrics = {name: value for result in results for name, value in result.metrics.items()}
    return metrics, spans_of([sampled, updated], iteration), FlowRunContext.get().flow_run.id


@flow(name="ui-test", flow_run_name="my-run", task_runner=ON_POOLS, persist_result=False)
def training():
    with UiWriter(every_seconds=0.0) as writer:
        shown = RunArtifacts(writer, "my-run", num_iterations=2)
        for number in range(2):
            metrics, spans, last = call_iteration(iteration, iteration=number, attempt=1, outage_seconds=30.0)
            shown.iteration(number, metrics, spans)
        shown.samples([Sample(prompt="53172=", response="12357", score=1.0, iteration=1)])
        shown.verdict("**rollout** limits this run: 71 % of the time")
    return FlowRunContext.get().flow_run.id, last


@pytest.fixture(scope="module")
def shown_run(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, object, object]]:
    """(UI address, id of the run, id of its last iteration)."""
    with prefect_api(PrefectConfig(home=str(tmp_path_factory.mktemp("ui")))) as url:
        roles = {"rollout": "sampling", "actor": "training"}
        with start_hosts(run_id="ui-test", role_pools=roles, steps=[rollout, actor_update]):
            run, last = training()
        yield ui_url(url), run, last


@pytest.fixture(scope="module")
def page(shown_run: tuple[str, object, object]) -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1500, "height": 1100})
        opened.set_default_timeout(WAIT_MS)
        yield opened
        browser.close()


def open_artifact(page, shown_run, key: str) -> None:
    """The newest version of an artifact, by way of its key's page."""
    page.goto(f"{shown_run[0]}/artifacts/key/{key}")
    page.locator('a[href*="/artifacts/artifact/"]').first.click()


def test_a_run_lists_its_iterations_by_number(page, shown_run):
    address, run, _ = shown_run
    page.goto(f"{address}/runs/flow-run/{run}")
    page.get_by_text("Subflow Runs").click()
    page.get_by_text("iteration-0000").first.wait_for()
    page.get_by_text("iteration-0001").first.wait_for()


def test_an_iteration_shows_each_step_with_pool_version_and_time(page, shown_run):
    address, _, last = shown_run
    page.goto(f"{address}/runs/flow-run/{last}")
    page.get_by_text("Task Runs", exact=True).click()
    page.get_by_text("rollout/sampling/v1").first.wait_for()
    row = page.locator(".p-list-item, li").filter(has_text="actor-update/training/v1").first
    row.wait_for()
    assert re.search(r"Completed.*\d+s", row.inner_text(), re.DOTALL), row.inner_text()


def test_role_timings_and_samples_are_artifacts_a_person_can_read(page, shown_run):
    open_artifact(page, shown_run, "my-run-role-timings")
    page.get_by_text("actor-update").first.wait_for()
    open_artifact(page, shown_run, "my-run-samples")
    page.get_by_text("12357").first.wait_for()


def test_the_learning_curve_is_drawn(page, shown_run):
    open_artifact(page, shown_run, "my-run-learning-curve")
    image = page.locator('img[src^="data:image/svg+xml"]').first
    image.wait_for()
    assert image.evaluate("element => element.naturalWidth") == 640
