"""What a person sees: the Prefect UI in headless Chromium, on a run of two iterations of the training flow."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from configs.training import PrefectConfig
from flows.ppo import ppo
from resources.samples import read_samples_of
from tasks.api import prefect_api, ui_url
from tests.flows.small_run import small

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]


@dataclass(frozen=True)
class ShownRun:
    """A finished run and where the UI shows it."""

    address: str
    name: str
    run_id: str
    last_iteration_id: str
    folder: Path


@pytest.fixture(scope="module")
def shown_run(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownRun]:
    folder = tmp_path_factory.mktemp("ui")
    with prefect_api(PrefectConfig(home=str(folder / "prefect"))) as url:
        config = small(folder, "my-run")
        ppo(config)
        with get_client(sync_client=True) as client:
            ids = {run.name: str(run.id) for run in client.read_flow_runs()}
        yield ShownRun(ui_url(url), config.name, ids[config.name], ids["iteration-0001"], folder / config.name)


@pytest.fixture(scope="module")
def page(shown_run: ShownRun) -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1500, "height": 1100})
        opened.set_default_timeout(WAIT_MS)
        yield opened
        browser.close()


def open_artifact(page, shown_run: ShownRun, key: str) -> None:
    """The newest version of an artifact, by way of its key's page."""
    page.goto(f"{shown_run.address}/artifacts/key/{shown_run.name}-{key}")
    page.locator('a[href*="/artifacts/artifact/"]').first.click()


def test_a_run_lists_its_iterations_by_number(page, shown_run: ShownRun):
    page.goto(f"{shown_run.address}/runs/flow-run/{shown_run.run_id}")
    page.get_by_text("Subflow Runs").click()
    page.get_by_text("iteration-0000").first.wait_for()
    page.get_by_text("iteration-0001").first.wait_for()


def test_an_iteration_shows_each_step_with_pool_version_and_time(page, shown_run: ShownRun):
    page.goto(f"{shown_run.address}/runs/flow-run/{shown_run.last_iteration_id}")
    page.get_by_text("Task Runs", exact=True).click()
    page.get_by_text("rollout/main/v1").first.wait_for()
    row = page.locator(".p-list-item, li").filter(has_text="actor-update/main/v1").first
    row.wait_for()
    assert re.search(r"Completed.*\d+s", row.inner_text(), re.DOTALL), row.inner_text()


def test_the_seconds_of_each_role_are_an_artifact_a_person_can_read(page, shown_run: ShownRun):
    open_artifact(page, shown_run, "role-timings")
    for step in ("rollout", "reward", "critic-update", "actor-update", "weight-sync"):
        page.get_by_text(step).first.wait_for()


def test_the_samples_show_the_problems_that_were_put(page, shown_run: ShownRun):
    rows = read_samples_of(shown_run.folder / "samples" / "iteration-000001.parquet")
    open_artifact(page, shown_run, "samples")
    page.get_by_text(re.compile(r"\d{5}=")).first.wait_for()
    assert any(row["prompt"] in page.locator("body").inner_text() for row in rows)


def test_the_learning_curve_is_drawn(page, shown_run: ShownRun):
    open_artifact(page, shown_run, "learning-curve")
    image = page.locator('img[src^="data:image/svg+xml"]').first
    image.wait_for()
    assert image.evaluate("element => element.naturalWidth") == 640
