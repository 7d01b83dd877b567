"""On-policy distillation through the real steps: two teachers, each for one task, and a smaller student."""

from pathlib import Path

import pytest

from configs.model import ModelConfig
from configs.run import RunConfig
from tests.tasks.lessons import accuracy_of_the_teachers, lesson, make_teacher, write_tasks
from tests.tasks.local_run import LocalRun, cast_here

Taught = tuple[Path, dict[str, dict[str, Path]]]
"""Folder of the teachers, by name, and the files of their tasks."""


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("teachers")
    files = write_tasks(folder)
    for name, file in files.items():
        make_teacher(file["learn"], folder / name)
    return folder, files


def train(config: RunConfig, iterations: int, start: Path | None = None) -> tuple[LocalRun, list[dict[str, float]]]:
    """Iterations of a run; `start`: a model folder in place of the config's own model."""
    if start is not None:
        config = config.model_copy(update={"model": ModelConfig(path=str(start))})
    run = LocalRun(config, cast_here(config))
    run.sync()
    metrics = [run.iterate() for _ in range(iterations)]
    if iterations == 1:
        run.context.groups["reward"].call("close")
    return run, metrics


@pytest.mark.slow
def test_a_student_of_two_teachers_reaches_nine_tenths_of_their_accuracy(taught: Taught) -> None:
    """From nothing: forward KL on the teachers' top tokens, over the student's own samples; no answer is shown."""
    config = lesson(
        *taught, "distillation.objective=forward_kl_top_k", "distillation.top_k=8", "actor.optimizer.lr=3e-3"
    )
    expected = accuracy_of_the_teachers(config)
    run, metrics = train(config, 45)
    reached = run.validate()["validation/accuracy"]
    run.context.groups["reward"].call("close")
    kl = [line["teacher/reverse_kl"] for line in metrics]
    print(f"teachers {expected:.3f}, student {reached:.3f}, reverse KL {kl[0]:.2f} -> {kl[-1]:.2f}")
    assert expected > 0.9
    assert reached >= 0.9 * expected
    assert kl[-1] < 0.2 * kl[0]
    assert sum(run.facts["teacher"]["rows"].values()) == 256
    assert min(run.facts["teacher"]["rows"].values()) > 0


@pytest.mark.slow
def test_reverse_kl_as_reward_or_loss_moves_the_student_and_task_rewards_mix_in(taught: Taught) -> None:
    """One iteration each; from half a student, which has learned one of the two tasks."""
    folder, files = taught
    for objective in ("reverse_kl_reward", "reverse_kl_loss"):
        config = lesson(folder, files, f"distillation.objective={objective}")
        _, metrics = train(config, 1, start=folder / "sort")
        assert metrics[0]["actor/grad_norm"] > 0
        assert metrics[0]["teacher/reverse_kl"] > 1.0
        assert (metrics[0]["advantage/magnitude"] > 0) == (objective == "reverse_kl_reward")
    mixed = ("distillation.objective=reverse_kl_reward", "distillation.task_reward_weight=0.5", "rollout.group_size=2")
    _, metrics = train(lesson(folder, files, *mixed), 1, start=folder / "sort")
    assert metrics[0]["advantage/magnitude"] > 0
    assert "reward/groups_with_signal" in metrics[0]  # the task's own estimator ran, and the teacher was added
