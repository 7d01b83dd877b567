"""Which faults are repaired, and what is told of them."""

from typing import Any

import pytest

from resources.failures import Failure, WorkerFailed
from tasks.collect import StepFailedError
from tasks.hosts import HostLostError
from tasks.recovery import RECOVERABLE_KINDS, _Fault, is_recoverable

NOT_ASKED: Any = None
"""The run is only looked at for exceptions in living workers."""


def failure(kind: str) -> Failure:
    return Failure(
        kind=kind, detail="d", role="critic", group="actor+critic", pool="main", rank=1, world_size=2,
        node_ip="10.0.0.1", node_id="n", pid=42, incarnation=3, method="update",
    )  # fmt: skip


def step_failed(cause: Exception) -> StepFailedError:
    error = StepFailedError("step 'critic-update' in pool 'main': ...")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("kind", RECOVERABLE_KINDS)
def test_the_end_of_a_process_is_repaired_whether_a_step_or_the_controller_met_it(kind: str):
    assert is_recoverable(NOT_ASKED, WorkerFailed(failure(kind)))
    assert is_recoverable(NOT_ASKED, step_failed(WorkerFailed(failure(kind))))


@pytest.mark.parametrize("error", [HostLostError("gone"), TimeoutError("late"), step_failed(TimeoutError("late"))])
def test_a_lost_host_and_a_missed_deadline_are_repaired(error: Exception):
    assert is_recoverable(NOT_ASKED, error)


def test_the_event_names_role_rank_node_and_pid():
    facts = _Fault(error=step_failed(WorkerFailed(failure("signal"))), noticed=5.0).facts()
    assert facts == {
        "role": "critic", "fault": "signal", "group": "actor+critic", "rank": 1, "node": "10.0.0.1", "pid": 42,
        "method": "update", "noticed": 5.0, "cause": "step 'critic-update' in pool 'main': ...",
    }  # fmt: skip


def test_a_lost_host_is_told_as_such():
    facts = _Fault(error=HostLostError("the task host of pool 'main' died: x\nmore"), noticed=5.0).facts()
    assert facts["role"] == "task host"
    assert facts["cause"] == "the task host of pool 'main' died: x"
