"""Steps: Prefect tasks with our settings, and bodies that run without Prefect."""

from collections.abc import Callable
from typing import Any

from prefect.cache_policies import NO_CACHE

from resources.store import BatchHandle, BatchStore, StoreView
from tasks.call import decode, encode, reference_to, resolve_task
from tasks.host import HostContext, host, use_host
from tasks.stamp import Stamp
from tasks.step import Step, StepResult, readers_of, step


@step(role="reward", reads=("input_ids", "record"), writes=("scores",))
def score_responses(batch: BatchHandle | None, policy_version: int = 0) -> StepResult:
    return StepResult(handle=batch, metrics={"seen": float(batch is not None)}, facts={"pool": host().pool})


@step(role="critic", name="critic-update", reads=("input_ids",))
def update(batches: list[BatchHandle]) -> StepResult:
    return StepResult(facts={"pools": [batch.pool for batch in batches]})


def test_a_step_never_caches_persists_or_retries_and_bears_no_tag():
    assert score_responses.cache_policy is NO_CACHE
    assert score_responses.persist_result is False
    assert score_responses.retries == 0
    assert score_responses.tags == set()
    assert score_responses.log_prints is False


def test_a_step_is_named_by_its_function_unless_told_otherwise():
    assert score_responses.name == "score-responses"
    assert update.name == "critic-update"


def test_options_keep_role_and_columns():
    changed = score_responses.with_options(name="other")
    assert isinstance(changed, Step)
    assert (changed.name, changed.role, changed.writes) == ("other", "reward", ("scores",))


def test_readers_are_the_steps_that_declare_a_column():
    assert readers_of([score_responses, update]) == {
        "input_ids": ("score-responses", "critic-update"),
        "record": ("score-responses",),
    }


def test_a_body_runs_without_prefect_and_sees_handles_for_results():
    handle = BatchHandle(pool="main", batch_id="b")
    with use_host(HostContext(pool="main", run_id="r", store=StoreView(BatchStore("main")))):
        result = score_responses.fn(StepResult(handle=handle, metrics={"x": 1.0}))
    assert result == StepResult(handle=handle, metrics={"seen": 1.0}, facts={"pool": "main"})


def test_results_in_a_list_become_handles_too():
    results = [StepResult(handle=BatchHandle(pool=pool, batch_id="b")) for pool in ("a", "c")]
    assert update.fn(results).facts == {"pools": ["a", "c"]}


def test_a_step_without_a_batch_arrives_as_none():
    with use_host(HostContext(pool="main", run_id="r", store=StoreView(BatchStore("main")))):
        assert score_responses.fn(StepResult()).metrics == {"seen": 0.0}


def run_name(made: Step, parameters: dict[str, Any]) -> str:
    """What the Prefect UI lists, as Prefect asks for it."""
    assert callable(made.task_run_name)
    name: Callable[..., str] = made.task_run_name  # Prefect calls it with `parameters`, which its type does not say
    return name(parameters=parameters)


def test_run_name_has_task_pool_and_policy_version():
    assert run_name(score_responses, {"policy_version": 7}) == "score-responses/v7"
    with use_host(HostContext(pool="gpu", run_id="r", store=StoreView(BatchStore("gpu")))):
        assert run_name(score_responses, {"policy_version": 7}) == "score-responses/gpu/v7"
        assert run_name(update, {}) == "critic-update/gpu"


def test_a_step_that_is_told_no_version_carries_that_of_its_iteration():
    at = Stamp(iteration=41, attempt=2, policy_version=39, epoch=0, start=0, count=4, kl_coef=0.0)
    assert run_name(update, {"at": at}) == "critic-update/v39"
    assert run_name(score_responses, {"at": at, "policy_version": 40}) == "score-responses/v40"


def test_a_step_of_a_test_travels_by_value():
    assert reference_to(update) is update
    again = resolve_task(decode(encode(update)))
    assert isinstance(again, Step)
    assert again.reads == ("input_ids",)
