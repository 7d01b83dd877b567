"""A process of a run dies or stops, in every phase of the DAG: the run ends with the bits of an undisturbed one."""

import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.ppo import ppo
from tests.chaos.commands import wait_until_gone
from tests.chaos.faults import Fault, Injector
from tests.chaos.runs import assert_same_run, events_of, tiny_config

PHASES = (
    ("rollout", "rollout"), ("actor", "actor-log-probs"), ("reference", "reference"), ("critic", "critic-values"),
    ("reward", "reward"), ("advantage", "advantage"), ("critic", "critic-update"), ("actor", "actor-update"),
    ("rollout", "weight-sync"), ("actor", "weight-sync"),
)  # fmt: skip
"""(duty whose worker is killed, step that runs at that moment)."""
SPARE_ITERATIONS = 3

Undisturbed = Callable[[RunConfig], Path]


def kills(phases: Sequence[tuple[str, str]], number: signal.Signals = signal.SIGKILL) -> list[Fault]:
    return [
        Fault(iteration=1 + index, target=target, step=step, number=number)
        for index, (target, step) in enumerate(phases)
    ]


def check_recovers(config: RunConfig, faults: Sequence[Fault], undisturbed: Undisturbed) -> None:
    """The run with these faults ends like the run without, every fault was made and repaired, and nothing is left."""
    expected = undisturbed(config)
    with Injector(faults=faults) as injector:
        ppo(config)
    run = Path(config.run_dir) / config.name
    assert not injector.left
    assert events_of(run, "recovered")
    assert_same_run(run, expected)
    assert wait_until_gone(config.name) == []


@pytest.mark.parametrize("layout", ["fused", "split"])
def test_a_worker_killed_in_any_phase_changes_no_bit(
    layout: str, chaos_seed: int, run_dir: Path, undisturbed: Undisturbed
):
    phases = random.Random(chaos_seed).sample(PHASES, len(PHASES))
    config = tiny_config(run_dir, f"kill-{layout}", layout, iterations=1 + len(phases) + SPARE_ITERATIONS)
    check_recovers(config, kills(phases), undisturbed)


@pytest.mark.parametrize("layout", ["fused", "split"])
def test_a_stopped_worker_changes_no_bit(layout: str, chaos_seed: int, run_dir: Path, undisturbed: Undisturbed):
    phases = random.Random(chaos_seed).sample(PHASES, 4)
    config = tiny_config(run_dir, f"stop-{layout}", layout, iterations=1 + len(phases) + SPARE_ITERATIONS)
    check_recovers(config, kills(phases, signal.SIGSTOP), undisturbed)


def test_a_task_host_killed_or_stopped_changes_no_bit(run_dir: Path, undisturbed: Undisturbed):
    config = tiny_config(run_dir, "hosts", "split", iterations=8)
    faults = [
        Fault(iteration=1, target="host learn", step="actor-update"),
        Fault(iteration=2, target="host sample", step="rollout"),
        Fault(iteration=3, target="host judge", step="reward"),
        Fault(iteration=4, target="host learn", step="actor-update", number=signal.SIGSTOP),
    ]
    check_recovers(config, faults, undisturbed)


def test_two_ranks_of_one_role_lose_one(run_dir: Path, undisturbed: Undisturbed):
    config = tiny_config(
        run_dir,
        "ranks",
        "split",
        iterations=6,
        pools={
            "learn": {"nodes": [2], "cpus_per_bundle": 1},
            "sample": {"nodes": [1], "cpus_per_bundle": 1},
            "judge": {"nodes": [1], "cpus_per_bundle": 1},
        },
        roles={"actor": {"pool": "learn", "workers": 2}, "critic": {"pool": "learn", "workers": 2}},
    )
    faults = [
        Fault(iteration=1, target="actor", step="actor-update", rank=1),
        Fault(iteration=2, target="critic", step="critic-update", rank=0),
        Fault(iteration=3, target="actor", step="weight-sync", rank=0),
    ]
    check_recovers(config, faults, undisturbed)


def test_an_engine_of_vllm_killed_changes_no_bit(run_dir: Path, undisturbed: Undisturbed):
    pytest.importorskip("vllm")
    config = tiny_config(run_dir, "vllm", "fused", iterations=4, engine="vllm")
    check_recovers(config, [Fault(iteration=1, target="rollout", step="rollout")], undisturbed)


def test_a_dead_grader_process_is_replaced_without_a_recovery(run_dir: Path, undisturbed: Undisturbed):
    config = tiny_config(run_dir, "grader", "fused", iterations=4)
    expected = undisturbed(config)
    with Injector(faults=[Fault(iteration=1, target="grader", step="rollout")]) as injector:
        ppo(config)
    assert not injector.left
    assert events_of(run_dir / "grader", "recovered") == []
    assert_same_run(run_dir / "grader", expected)


def test_saves_that_block_are_as_exact(run_dir: Path, undisturbed: Undisturbed):
    config = tiny_config(run_dir, "blocking", iterations=6, checkpoint={"every": 1, "asynchronous": False})
    faults = kills([("actor", "checkpoint"), ("critic", "checkpoint")])
    check_recovers(config, faults, undisturbed)
