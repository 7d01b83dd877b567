"""A process of a run dies or stops, in every phase of the DAG: the run ends with the bits of an undisturbed one."""

import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.ppo import ppo
from resources.checkpoints import CheckpointStore
from tests.chaos.commands import wait_until_gone
from tests.chaos.faults import Fault, Injector
from tests.chaos.runs import assert_same_run, events_of, metrics_of, tiny_config

PHASES = (
    "rollout", "reward", "actor-log-probs", "reference", "critic-values", "advantage", "critic-update",
    "actor-update", "weight-sync", "checkpoint",
)  # fmt: skip
DUTIES = {
    "fused": ("actor", "reward", "advantage"),  # one of each process: actor, critic, reference, rollout share theirs
    "split": ("actor", "critic", "reference", "rollout", "reward", "advantage"),
}
PARTS = {"fused": 3, "split": 6}
"""Runs of ten faults, one an iteration."""
FAULTS_IN_PART = 5
SPARE_ITERATIONS = 5
"""For moments that were over before they were seen."""
ITERATIONS = 1 + 10 + SPARE_ITERATIONS
STOPPED_SECONDS = 5.0
"""Shorter than the default of 10, which the table measures."""
EVERY_PART = [(layout, part) for layout, parts in PARTS.items() for part in range(parts)]
SAVES = {"every": 1, "asynchronous": False}
"""So that each iteration has a checkpoint step."""

Undisturbed = Callable[[RunConfig], Path]


def matrix(layout: str, part: int, seed: int, number: signal.Signals) -> list[Fault]:
    """A part of role x phase, in the order that the seed chooses."""
    pairs = [(duty, phase) for duty in DUTIES[layout] for phase in PHASES]
    chosen = random.Random(seed).sample(pairs, len(pairs))[part :: PARTS[layout]]
    return [
        Fault(iteration=1 + index, target=duty, step=phase, number=number, rank=index)
        for index, (duty, phase) in enumerate(chosen)
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


def config_of(run_dir: Path, name: str, layout: str = "split", iterations: int = ITERATIONS) -> RunConfig:
    """The same for all tests of a layout but its name, so that they share one undisturbed run."""
    recovery = {"stopped_after_seconds": STOPPED_SECONDS}
    return tiny_config(run_dir, name, layout, iterations=iterations, checkpoint=SAVES, recovery=recovery)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("layout", "part"), EVERY_PART)
def test_a_worker_killed_or_stopped_in_any_phase_changes_no_bit(
    layout: str,
    part: int,
    number: signal.Signals,
    chaos_seed: int,
    is_part: bool,
    run_dir: Path,
    undisturbed: Undisturbed,
):
    faults = matrix(layout, part, chaos_seed, number)[: FAULTS_IN_PART if is_part else None]
    config = config_of(run_dir, f"{number.name.lower()}-{layout}", layout, 1 + len(faults) + SPARE_ITERATIONS)
    check_recovers(config, faults, undisturbed)


def test_a_task_host_killed_or_stopped_changes_no_bit(run_dir: Path, undisturbed: Undisturbed):
    faults = [
        Fault(iteration=1, target="host learn", step="actor-update"),
        Fault(iteration=2, target="host sample", step="rollout"),
        Fault(iteration=3, target="host judge", step="reward"),
        Fault(iteration=4, target="host learn", step="actor-update", number=signal.SIGSTOP),
        Fault(iteration=5, target="host sample", step="rollout", number=signal.SIGSTOP),
        Fault(iteration=6, target="host judge", step="reference", number=signal.SIGSTOP),
        Fault(iteration=7, target="host learn", step="weight-sync"),
    ]
    check_recovers(config_of(run_dir, "hosts"), faults, undisturbed)


def test_a_fault_during_the_repair_of_another_changes_no_bit(run_dir: Path, undisturbed: Undisturbed):
    faults = [
        Fault(iteration=1, target="actor", step="actor-update"),
        Fault(iteration=1, target="rollout", step="load-state"),
        Fault(iteration=2, target="critic", step="critic-update"),
        Fault(iteration=2, target="actor", step="load-state"),
    ]
    check_recovers(config_of(run_dir, "again"), faults, undisturbed)


def test_everything_but_the_controller_killed_or_stopped_at_once_changes_no_bit(
    run_dir: Path, undisturbed: Undisturbed
):
    faults = [
        Fault(iteration=1, target="everything", step="rollout"),
        Fault(iteration=2, target="everything", step="actor-update"),
        Fault(iteration=3, target="everything", step="rollout", number=signal.SIGSTOP),
    ]
    check_recovers(config_of(run_dir, "everything"), faults, undisturbed)


def test_two_ranks_of_one_role_lose_one(run_dir: Path, undisturbed: Undisturbed):
    config = tiny_config(
        run_dir,
        "ranks",
        "split",
        iterations=8,
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


def test_a_run_that_samples_ahead_trains_on_the_same_rows_once_each(run_dir: Path, undisturbed: Undisturbed):
    config = tiny_config(run_dir, "ahead", "split", iterations=8, async_depth=1)
    faults = [
        Fault(iteration=1, target="rollout", step="actor-update"),
        Fault(iteration=2, target="actor", step="actor-update"),
        Fault(iteration=3, target="host sample", step="rollout"),
    ]
    expected = undisturbed(config)
    with Injector(faults=faults) as injector:
        ppo(config)
    assert not injector.left
    assert events_of(run_dir / "ahead", "recovered")
    assert [line["iteration"] for line in metrics_of(run_dir / "ahead")] == list(range(8))
    assert position_of(run_dir / "ahead") == position_of(expected)
    assert wait_until_gone("ahead") == []


def position_of(run: Path) -> dict[str, object]:
    """Where the data stands after the last iteration."""
    newest, _ = CheckpointStore(run / "checkpoints").latest()
    assert newest is not None
    return newest.data_position


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_snapshot_writer_loses_no_checkpoint(
    number: signal.Signals, run_dir: Path, undisturbed: Undisturbed
):
    config = tiny_config(
        run_dir,
        "writer",
        iterations=8,
        checkpoint={"every": 1, "keep": -1},
        recovery={"stopped_after_seconds": STOPPED_SECONDS},
    )
    expected = undisturbed(config)
    faults = [Fault(iteration=iteration, target="writer", number=number) for iteration in (2, 4)]
    with Injector(faults=faults) as injector:
        ppo(config)
    assert not injector.left
    assert events_of(run_dir / "writer", "recovered") == []
    assert CheckpointStore(run_dir / "writer" / "checkpoints").iterations() == list(range(1, 9))
    assert_same_run(run_dir / "writer", expected)
