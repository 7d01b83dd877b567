"""Two small tasks and a teacher for each, made here by supervised learning, for the tests of distillation."""

import functools
import itertools
import json
import random
from pathlib import Path

from configs.data import DataConfig, SourceConfig
from configs.load import load_config
from configs.model import ModelConfig, ModelShape, OptimizerConfig
from configs.run import RunConfig
from configs.training import TrainedRoleConfig
from resources.batch import row_lengths
from resources.update_plan import make_update_plans
from resources.workers.actor import ActorWorker
from resources.workers.demonstrations import DemonstrationWorker
from tasks.algorithms.supervised import supervised_objective
from tests.tasks.local_run import LocalRun, cast_here

LARGE = ModelShape(num_layers=2, hidden_size=64, intermediate_size=256, num_heads=4, vocab_size=128, max_positions=32)
SMALL = LARGE.model_copy(update={"num_layers": 1})
HELD_OUT = 40


def write_tasks(folder: Path) -> dict[str, dict[str, Path]]:
    """`312=` -> `123` (sorting) and `312>` -> `213` (reversing): files of rows to learn and of rows held out."""
    files: dict[str, dict[str, Path]] = {}
    digits = ["".join(number) for number in itertools.product("0123456789", repeat=3)]
    random.Random(0).shuffle(digits)
    solve = {"sort": (lambda text: "".join(sorted(text)), "="), "reverse": (lambda text: text[::-1], ">")}
    for name, (answer, mark) in solve.items():
        rows = [{"prompt": text + mark, "answer": answer(text)} for text in digits]
        files[name] = {"held_out": folder / f"{name}-held-out.json", "learn": folder / f"{name}.json"}
        files[name]["held_out"].write_text(json.dumps(rows[:HELD_OUT]))
        files[name]["learn"].write_text(json.dumps(rows[HELD_OUT:]))
    return files


def make_teacher(file: Path, folder: Path, steps: int = 120, seed: int = 0, shape: ModelShape = LARGE) -> None:
    """Fit a model to the rows of `file` and export it to `folder`."""
    model = ModelConfig(build="tiny", shape=shape)
    settings = TrainedRoleConfig(optimizer=OptimizerConfig(lr=3e-3), micro_batch_size=64)
    source = SourceConfig(name=file.stem, kind="json", path=str(file))
    data = DataConfig(sources=(source,), prompts_per_iteration=64, max_prompt_length=8)
    rows = DemonstrationWorker(model, data).read(0, 0, steps * 64)[1]
    lengths = row_lengths(rows.get("input_ids")).tolist()
    plan = make_update_plans(
        rows["row_ids"].tolist(),
        lengths,
        rows["response_lengths"].tolist(),
        micro_batch_size=64,
        num_mini_batches=steps,
        shuffle=False,
    )[0]
    worker = ActorWorker(model, settings, seed, threads=1)
    worker.update(rows, plan, functools.partial(supervised_objective))
    worker.export(str(folder))


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
