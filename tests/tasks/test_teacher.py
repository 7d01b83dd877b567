"""On-policy distillation through the real steps: two teachers, each for one task, and a smaller student."""

from pathlib import Path

import pytest

from configs.load import load_config
from configs.model import ModelConfig
from configs.run import RunConfig
from tasks.local_run import LocalRun, cast_here
from tests.tasks.lessons import make_teacher, write_tasks

Taught = tuple[Path, dict[str, dict[str, Path]]]
"""Folder of the teachers, by name, and the files of their tasks."""
SHAPE = "{num_layers: %d, hidden_size: 64, intermediate_size: 256, num_heads: 4, vocab_size: 128, max_positions: 32}"


def lesson(folder: Path, files: dict[str, dict[str, Path]], *overrides: str) -> RunConfig:
    """Two sources, and the teachers in `folder` that know one of them each."""

    def sources(part: str) -> str:
        return ", ".join(f"{{name: {name}, kind: json, path: {file[part]}}}" for name, file in files.items())

    teachers = ", ".join(
        f"{{name: {name}, sources: [{name}], model: {{path: {folder / name}, shape: {SHAPE % 2}}}}}" for name in files
    )
    return load_config(
        "quickstart-distillation",
        [
            f"teachers=[{teachers}]",
            f"model.shape={SHAPE % 1}",
            f"data.sources=[{sources('learn')}]",
            f"validation.sources=[{sources('held_out')}]",
            "validation.num_prompts=80",
            "rollout.engine=huggingface",
            "roles.teacher.workers=2",
            "data.prompts_per_iteration=256",
            "algorithm.num_mini_batches=8",
            "actor.optimizer.lr=3e-3",
            *overrides,
        ],
    )


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("teachers")
    files = write_tasks(folder)
    for name, file in files.items():
        make_teacher(file["learn"], folder / name)
    return folder, files


def accuracy_of_the_teachers(config: RunConfig) -> float:
    """Each on its own task, weighted alike; measured with the same greedy validation."""
    found = []
    for teacher in config.teachers:
        own = [source for source in config.validation.sources if source.name in teacher.sources]
        alone = config.model_copy(
            update={
                "model": teacher.model,
                "validation": config.validation.model_copy(update={"sources": tuple(own), "num_prompts": 40}),
            }
        )
        groups = cast_here(alone)
        found.append(LocalRun(alone, groups).validate()["validation/accuracy"])
        groups["reward"].call("close")
    return sum(found) / len(found)


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
