"""What grading would take in another layout, from the calls that a run measured.

Pure. Graders make some calls at once; with streaming they begin while the rollout still decodes.
"""

from resources.telemetry.profile import RunProfile, TaskProfile
from resources.telemetry.sampling import finished_shares, rollout_seconds_of
from resources.telemetry.task_ranks import GRADING_TASK
from resources.telemetry.topology import Topology, measured_topology, ranks_of_task


def grading_seconds(
    task: TaskProfile, profile: RunProfile, topology: Topology, rows_ratio: float, rollout_seconds: float
) -> float:
    """What grading leaves after the rollout: what the graders' calls do, and what was measured beyond that.

    The rest (calls of the workers, scores put together, graders of another pool of processes) grows with the rows.
    """
    ranks_ratio = ranks_of_task(task, profile, topology) / task.num_ranks
    rest = 0.0
    if task.mean_seconds and profile.grader is not None:
        before = measured_topology(profile)
        rollout = rollout_seconds_of(profile.rollout, before, 0) if profile.rollout is not None else 0.0
        rest = max(0.0, task.mean_seconds - _grading_calls_seconds(profile, before, 1.0, 1.0, rollout))
    calls = _grading_calls_seconds(profile, topology, rows_ratio, ranks_ratio, rollout_seconds)
    return calls + rest * rows_ratio / ranks_ratio


def _grading_calls_seconds(
    profile: RunProfile, topology: Topology, rows_ratio: float, workers_ratio: float, rollout_seconds: float
) -> float:
    """Calls x latency / calls at once; streamed, less what is graded before the last response ends.

    A call begins when its response has ended, so from each moment on the graders have those to do that end after it:
    responses that end together hide nothing, however long the rollout is.
    """
    grader = profile.grader
    assert grader is not None
    workers = max(1.0, grader.workers * workers_ratio)
    total = grader.total_seconds * rows_ratio / workers
    longest = min(grader.max_seconds, grader.total_seconds)
    if not grader.is_streamed or profile.rollout is None:
        return max(longest, total)
    ends = finished_shares(profile.rollout, topology)
    left = (total * share - rollout_seconds * (1.0 - moment) for moment, share in ends)
    return max(longest, *left)


def grading_capacity_seconds(profile: RunProfile, topology: Topology) -> float:
    """Seconds the graders need for one iteration's rows, hidden or not."""
    if profile.grader is None or "reward" not in topology.roles:
        return 0.0
    reward = profile.tasks.get(GRADING_TASK)
    workers_ratio = ranks_of_task(reward, profile, topology) / reward.num_ranks if reward is not None else 1.0
    rows = topology.prompts_per_iteration * topology.group_size
    rows_ratio = rows / max(1, profile.prompts_per_iteration * profile.group_size)
    return profile.grader.total_seconds * rows_ratio / max(1.0, profile.grader.workers * workers_ratio)
