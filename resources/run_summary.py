"""What a run came to, read from its folder: the line that `train` and `resume` print with --json."""

from pathlib import Path
from typing import Any

from resources.run_directory import read_lines

RECENT_ITERATIONS = 10
"""Over which the summary averages what a single batch measures noisily."""


def summarise(
    run: Path, iterations: int, seconds: float, verdict: str | None, first_validation: dict[str, float]
) -> dict[str, Any]:
    """Accuracy before and after, and recent means of what a person asks for first; None where there is none."""
    lines = list(read_lines(run / "metrics.jsonl"))
    scored = [line for line in lines if "validation/accuracy" in line]
    first = first_validation or (scored[0] if scored else {})
    last = scored[-1] if scored else {}
    return {
        "run": str(run),
        "iterations": iterations,
        "seconds": round(seconds, 3),
        "accuracy_before": first.get("validation/accuracy"),
        "accuracy_after": last.get("validation/accuracy"),
        "sampled_accuracy_before": first.get("validation/sampled_accuracy"),
        "sampled_accuracy_after": last.get("validation/sampled_accuracy"),
        "explained_variance": _recent(lines, "critic/explained_variance"),
        "kl_to_reference": _recent(lines, "actor/reference_kl"),
        "verdict": verdict,
    }


def finished_summary(run: Path, iterations: int) -> dict[str, Any] | None:
    """The summary of a run whose newest whole checkpoint is its last; None for one that has iterations to go.

    Raises CheckpointError when there are checkpoints and none can be read: to go on would begin the run again.
    """
    from resources.checkpoints import CheckpointError, CheckpointStore  # imports torch

    store = CheckpointStore(run / "checkpoints")
    newest, problems = store.latest(run / "metrics.jsonl")
    if newest is None and store.iterations():
        raise CheckpointError(
            f"{run} has checkpoints and none that can be read: {'; '.join(problems)}; move {store.folder} away to "
            "begin the run again"
        )
    if newest is None or newest.iteration < iterations:
        return None
    first = newest.state.get("parts", {}).get("first_validation", {})
    return summarise(run, newest.iteration, 0.0, None, first)


def _recent(lines: list[dict[str, Any]], name: str) -> float | None:
    """Mean over the last iterations that have it: one batch alone says little."""
    found = [line[name] for line in lines[-RECENT_ITERATIONS:] if line.get(name) is not None]
    return sum(found) / len(found) if found else None
