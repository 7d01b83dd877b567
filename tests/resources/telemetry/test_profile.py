"""What a what-if starts from: graders, engines, cores and memory as a run's spans tell them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resources.telemetry.probes import GraderLatency
from resources.telemetry.profile import RunProfile
from resources.telemetry.report import profile_of_run, search_layout
from resources.telemetry.search import fits_memory, search_topology
from resources.telemetry.spans import IterationSpan, PoolRecord, RankSpan, RunRecord, TaskSpan
from resources.telemetry.text_report import render_search
from resources.telemetry.topology import measured_topology, override_topology, with_ranks
from resources.telemetry.whatif import predict, predict_unchanged
from tests.resources.telemetry.scenarios import grader_facts, iteration, run_record, write_run
from tests.resources.telemetry.test_whatif import POOLS, SPLIT, fused, gauged, profile

Made = tuple[list[TaskSpan], IterationSpan]


def measured(folder: Path, made: Sequence[Made], run: RunRecord | None = None) -> RunProfile:
    return profile_of_run(write_run(folder, made, run or run_record()))


def after(made: Made, name: str, role: str, upstream: str, *ranks: RankSpan, **facts: Any) -> Made:
    """The iteration with a task that begins when `upstream` has ended; ranks count from there."""
    tasks, span = made
    begin = next(task.ended for task in tasks if task.task == upstream)
    placed = tuple(replace(rank, start=begin + rank.start, end=begin + rank.end) for rank in ranks)
    more = TaskSpan(
        iteration=span.iteration, task=name, role=role, pool=role, submitted=begin, started=begin,
        ended=placed[-1].end, upstream=(upstream,), ranks=placed, facts=facts,
    )  # fmt: skip
    return [*tasks, more], replace(span, ended=max(span.ended, placed[-1].end))


# --- graders --------------------------------------------------------------------------------------------------------


def graded(number: int, **more: Any) -> Made:
    """32 calls of 0.25 s in two processes, 4 s behind a rollout of 3 s."""
    facts = {"reward": grader_facts([0.25] * 32, workers=2), **more.pop("facts", {})}
    seconds = {"reward": 4.0, **more.pop("seconds", {})}
    return iteration(
        number, 20.0 * number, seconds=seconds, facts=facts, ranks={"rollout": gauged, **more.pop("ranks", {})}
    )


def test_the_samples_that_are_written_are_no_grading(tmp_path: Path):
    """Each default run has that task of the reward role, with no graders: half the grading was lost to it."""
    runs = [after(graded(n), "samples", "reward", "advantage", RankSpan(rank=0, start=0.0, end=0.3)) for n in range(3)]
    found = measured(tmp_path, runs)
    assert found.grader is not None
    assert (found.grader.total_seconds, found.grader.max_seconds) == (pytest.approx(8.0), pytest.approx(0.25))
    prediction = predict(found, measured_topology(found))
    assert prediction.busy_seconds["reward"] == pytest.approx(4.0 + 0.3)
    assert prediction.step_seconds == pytest.approx(found.measured_step_seconds, rel=0.01)
    larger = replace(measured_topology(found), group_size=16, max_running_sequences=128)
    assert predict(found, larger).busy_seconds["reward"] == pytest.approx(4 * (4.0 + 0.3))


def test_a_reward_model_is_the_reward_tasks_own_work_and_streams_nothing(tmp_path: Path):
    """6 s of a model before 4 s of graders: twice the rows take twice of both."""
    model = GraderLatency("rm", "model", 1)
    model.add(6.0)
    facts = grader_facts([0.25] * 32, workers=2)
    facts = {"graders": [*facts["graders"], model.facts()], "hidden_seconds": 0.0}

    def ranks(begin: float, end: float) -> list[RankSpan]:
        return [
            RankSpan(rank=0, start=begin, end=begin + 6.0, duty="reward_model.rm", facts={"tokens": 640}),
            RankSpan(rank=0, start=begin + 6.0, end=begin + 10.0, facts={"rows": 32}),
        ]

    found = measured(tmp_path, [graded(n, facts={"reward": facts}, ranks={"reward": ranks}) for n in range(3)])
    assert found.grader is not None
    assert found.grader.total_seconds == pytest.approx(8.0)
    assert found.tasks["reward"].mean_seconds == pytest.approx(10.0)
    base = measured_topology(found)
    assert predict(found, base).busy_seconds["reward"] == pytest.approx(10.0)
    twice = replace(base, group_size=8, max_running_sequences=128)
    assert predict(found, twice).busy_seconds["reward"] == pytest.approx(20.0)


def test_what_a_refilled_rollout_waits_for_its_scores_is_grading_behind_it(tmp_path: Path):
    """Dynamic sampling: 3 s of decoding, then 16 calls of 0.5 s, two at once, in the rollout's own step."""

    def ranks(begin: float, end: float) -> list[RankSpan]:
        return [*gauged(begin, begin + 3.0), RankSpan(rank=0, start=begin + 3.0, end=begin + 7.0, duty="reward")]

    facts = {"rollout": grader_facts([0.5] * 16, workers=2)}
    runs = [iteration(n, 20.0 * n, seconds={"reward": 0.0}, facts=facts, ranks={"rollout": ranks}) for n in range(3)]
    found = measured(tmp_path, runs)
    assert found.grader is not None
    assert (found.grader.total_seconds, found.grader.workers) == (pytest.approx(8.0), 2)
    # The siblings' 0.5 s are simulated beside the grading, and came after it.
    assert predict_unchanged(found) == pytest.approx(found.measured_step_seconds - 0.5, rel=0.01)


# --- engines --------------------------------------------------------------------------------------------------------


def engines(count: int, tensor_parallel: int) -> Any:
    """So many engines of 3 s; of each the first rank tells, its peers are only called."""

    def made(begin: float, end: float) -> list[RankSpan]:
        told = gauged(begin, begin + 3.0)[0]
        facts = {**told.facts, "rows": 32 // count, "tokens": 3200 // count}
        return [
            RankSpan(rank=rank, start=begin, end=begin + 3.0, facts={} if rank % tensor_parallel else facts)
            for rank in range(count * tensor_parallel)
        ]

    return made


def on_engines(folder: Path, count: int, tensor_parallel: int, bundles: int, **record: Any) -> RunProfile:
    runs = [iteration(n, 10.0 * n, ranks={"rollout": engines(count, tensor_parallel)}) for n in range(3)]
    run = run_record(**record)
    return measured(folder, runs, replace(run, pools={**run.pools, "rollout": PoolRecord(ranks=bundles)}))


@pytest.mark.parametrize(("count", "tensor_parallel", "bundles"), [(4, 2, 8), (8, 1, 8), (1, 4, 4), (1, 1, 2)])
def test_a_run_is_measured_with_the_tensor_parallelism_it_had(
    tmp_path: Path, count: int, tensor_parallel: int, bundles: int
):
    found = on_engines(tmp_path, count, tensor_parallel, bundles)
    assert found.rollout is not None
    assert (found.rollout.num_engines, found.rollout.tensor_parallel) == (count, tensor_parallel)
    base = measured_topology(found)
    assert base.tensor_parallel == tensor_parallel
    # As a plan of the same config says it: the layout that was measured is not sped up.
    assert predict(found, replace(base, tensor_parallel=tensor_parallel)).step_seconds == predict_unchanged(found)
    assert predict_unchanged(found) == pytest.approx(found.measured_step_seconds, rel=0.01)


def test_engines_cut_over_twice_the_ranks_decode_in_five_ninths(tmp_path: Path):
    found = on_engines(tmp_path, 4, 2, 8)
    base = measured_topology(found)
    cut = predict(found, replace(base, tensor_parallel=4)).busy_seconds["rollout"]
    assert cut == pytest.approx(3.0 / 1.8)
    assert predict(found, replace(base, tensor_parallel=1)).busy_seconds["rollout"] == pytest.approx(6.0)


def test_one_rank_on_a_larger_pool_is_one_engine_until_the_pool_is_changed(tmp_path: Path):
    base = measured_topology(on_engines(tmp_path, 1, 1, 2))
    assert base.ranks_of("rollout") == 1
    assert override_topology(base, {"pools.rollout.bundles": "4"}).ranks_of("rollout") == 4
    assert override_topology(base, {"rollout.group_size": "8"}).ranks_of("rollout") == 1
    assert with_ranks(base, rollout=3).ranks_of("rollout") == 3


def test_servers_tell_of_all_their_engines_by_one_front(tmp_path: Path):
    """Four engines of two ranks: the rows of one answer are theirs together."""
    found = on_engines(tmp_path, 1, 1, 8, rollout_engines=4, rollout_tensor_parallel=2)
    assert found.rollout is not None
    assert (found.rollout.num_engines, found.rollout.tensor_parallel) == (4, 2)
    assert measured_topology(found).tensor_parallel == 2
    assert predict_unchanged(found) == pytest.approx(found.measured_step_seconds, rel=0.01)


def test_a_validation_takes_its_own_seconds_and_not_a_rollouts(tmp_path: Path):
    """Every other iteration 8 s of sampling and 2 s of grading: five seconds a step, whatever the rollout takes."""
    ranks = (RankSpan(rank=0, start=0.0, end=8.0), RankSpan(rank=0, start=8.0, end=10.0, duty="reward"))
    long = {"response_length_histogram": {"861": 64}, "response_length_max": 1000, "rows": 64}
    ranks = (replace(ranks[0], facts=long), ranks[1])
    runs = [iteration(n, 30.0 * n, ranks={"rollout": gauged}) for n in range(5)]
    runs = [
        after(made, "validation", "rollout", "weight-sync", *ranks) if n % 2 else made for n, made in enumerate(runs)
    ]
    found = measured(tmp_path, runs)
    assert found.rollout is not None
    assert found.rollout.length_edges == (100, 100)  # nothing of the held-out responses
    assert found.tasks["validation"].mean_seconds == pytest.approx(10.0)
    base = measured_topology(found)
    assert predict(found, base).step_seconds == pytest.approx(SPLIT + 5.0, rel=0.02)
    more = predict(found, replace(base, prompts_per_iteration=16, max_running_sequences=8)).busy_seconds["rollout"]
    assert more == pytest.approx(8 * 3.0 + 5.0)


# --- nodes ----------------------------------------------------------------------------------------------------------


def test_pools_on_different_nodes_have_the_cores_of_both(tmp_path: Path):
    """Engines on one node of two cores, training on another: four cores for a demand of four."""
    pools = {"engines": PoolRecord(ranks=1), "train": PoolRecord(ranks=1)}
    runs = []
    for number in range(3):
        tasks, span = iteration(number, 10.0 * number)
        placed = []
        for task in tasks:
            node, pool = ("b", "engines") if task.role == "rollout" else ("a", "train")
            ranks = tuple(replace(rank, node=node) for rank in task.ranks)
            placed.append(replace(task, node=node, pool=pool, ranks=ranks))
        runs.append((placed, span))
    assert measured(tmp_path / "two", runs, run_record(cores_per_node=2.0, pools=pools)).cores == 4.0
    one = [([replace(task, node="a", ranks=()) for task in tasks], span) for tasks, span in runs]
    assert measured(tmp_path / "one", one, run_record(cores_per_node=2.0, pools=pools)).cores == 2.0
    wide = {**pools, "train": PoolRecord(ranks=3, nodes=3)}
    assert measured(tmp_path / "wide", one, run_record(cores_per_node=2.0, pools=wide)).cores == 6.0


# --- memory ---------------------------------------------------------------------------------------------------------

ACCELERATED = frozenset({"actor", "critic", "reference", "rollout"})


def test_a_search_says_what_it_could_not_know_of_memory(tmp_path: Path):
    run = run_record(pools={role: PoolRecord(ranks=1, accelerator="gpu") for role in POOLS})
    write_run(tmp_path, [iteration(0, ranks={"rollout": gauged})], run)
    said = render_search(search_layout(tmp_path, 4))
    assert "assumed: the memory of an accelerator is unknown: no layout was left out for want of it" in said
    made = replace(profile(), accelerator_pools=ACCELERATED, accelerator_bytes=80e9)
    heavy = {name: replace(task, memory_bytes=10e9) for name, task in made.tasks.items() if task.role != "rollout"}
    found = search_topology(replace(made, tasks={**made.tasks, **heavy}), 4)
    assert found.assumptions == ("the memory that rollout took was not measured: taken as none",)


def test_roles_that_shared_a_process_are_not_counted_once_for_each():
    """A fused process of 60 of 80 GB: each of its roles reports all of it, and the layout it was measured in fits."""
    made = replace(profile(), accelerator_pools=frozenset({"main"}), accelerator_bytes=80e9)
    layout = replace(fused(measured_topology(made)), accelerator_pools=frozenset({"main"}))
    tasks = {name: replace(task, memory_bytes=60e9) for name, task in made.tasks.items()}
    apart = replace(made, tasks=tasks)
    assert not fits_memory(apart, layout)  # processes of their own take 60 GB each
    together = replace(apart, roles=dict(layout.roles), colocate=dict(layout.colocate))
    assert fits_memory(together, layout)
    assert not fits_memory(replace(together, accelerator_bytes=50e9), layout)
