"""The distillation flow on real Ray and Prefect: two teachers on a pool of their own, and what a run leaves behind."""

from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.problems import ConfigError
from configs.run import RunConfig
from flows.distillation import distillation
from resources.run_directory import read_lines
from tests.tasks.lessons import make_teacher, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]

SHAPE = "{num_layers: %d, hidden_size: 64, intermediate_size: 256, num_heads: 4, vocab_size: 128, max_positions: 32}"


def small(folder: Path, name: str, *more: str) -> RunConfig:
    files = write_tasks(folder)
    for task, file in files.items():
        if not (folder / task).exists():
            make_teacher(file["learn"], folder / task, steps=2)
    teachers = ", ".join(
        f"{{name: {task}, sources: [{task}], model: {{path: {folder / task}, shape: {SHAPE % 2}}}}}" for task in files
    )
    sources = ", ".join(f"{{name: {task}, kind: json, path: {file['learn']}}}" for task, file in files.items())
    return load_config(
        "quickstart-distillation",
        [
            f"run_dir={folder}/runs",
            f"name={name}",
            "iterations=2",
            f"model.shape={SHAPE % 1}",
            f"teachers=[{teachers}]",
            f"data.sources=[{sources}]",
            "validation.sources=[]",
            "validation.every=0",
            "rollout.engine=huggingface",
            "data.prompts_per_iteration=16",
            "algorithm.num_mini_batches=2",
            "sft.steps=0",
            "checkpoint.asynchronous=false",
            "roles.teacher.workers=2",
            *more,
        ],
    )


def lines(config: RunConfig, name: str) -> list[dict[str, Any]]:
    return list(read_lines(Path(config.run_dir) / config.name / name))


def test_a_run_teaches_with_two_teachers_on_their_own_pool(tmp_path: Path) -> None:
    config = small(tmp_path, "taught")
    assert distillation(config)["iterations"] == 2
    metrics = lines(config, "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [0, 1]
    assert {"teacher/reverse_kl", "actor/teacher_forward_kl", "reward/score_mean"} <= set(metrics[0])
    spans = [span for span in lines(config, "spans.jsonl") if span.get("task") == "teacher"]
    assert len(spans) == 2
    assert {span["pool"] for span in spans} == {"teachers"}
    assert [rank["rank"] for rank in spans[0]["ranks"]] == [0, 1]  # one worker of each teacher


def test_a_lesson_may_hold_the_student_near_a_reference(tmp_path: Path) -> None:
    kl = "algorithm.kl={coef: 0.1, place: loss, refresh_every: 1}"
    config = small(tmp_path, "held", kl, "roles.reference={pool: main, colocate: fused, workers: 1}")
    assert distillation(config)["iterations"] == 2
    metrics = lines(config, "metrics.jsonl")
    # What the second update started from is what the reference became, so there is no distance yet.
    assert [line["actor/reference_kl"] for line in metrics] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert all(line["actor/kl_loss"] > 0.0 for line in metrics)  # of the later optimizer steps of an iteration
    steps = [span["task"] for span in lines(config, "spans.jsonl") if "task" in span]
    assert (steps.count("reference"), steps.count("refresh-reference")) == (2, 2)


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = small(tmp_path, "refused")
    file = tmp_path / "sort" / "tokenizer.json"
    file.write_text(file.read_text().replace('"@":', '"\u00e9":'))
    with pytest.raises(ConfigError, match="teacher 'sort' has another tokenizer"):
        distillation(config)
    assert not (tmp_path / "runs" / "refused").exists()
