"""A judge that the run serves itself: beside the reward worker, asked over loopback."""

import json
from pathlib import Path

from configs.model import ModelConfig, ModelShape
from configs.rollout import RolloutConfig
from resources.grader_backends import build_backends
from resources.graders import Grader, Sample
from resources.judge import SERVED_HERE, JudgeSettings
from resources.reward_loop import RewardLoop
from resources.workers.judge import JudgeWorker
from tests.tasks.lessons import make_teacher

SHAPE = ModelShape(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=2, vocab_size=128, max_positions=64)


def sample(row_id: int, response: str) -> Sample:
    return Sample(
        row_id=row_id, group_id=row_id, prompt="p", response=response, answer="", source="s", index=0, extra={},
        finish_reason=0, response_length=1,
    )  # fmt: skip


def test_each_response_gets_the_number_that_the_served_model_says(tmp_path: Path):
    """The judge was taught two verdicts by heart."""
    verdicts = [{"prompt": "good?", "answer": "1"}, {"prompt": "bad?", "answer": "0.2"}] * 32
    (tmp_path / "verdicts.json").write_text(json.dumps(verdicts))
    make_teacher(tmp_path / "verdicts.json", tmp_path / "judge", steps=60, shape=SHAPE)
    worker = JudgeWorker(
        "critic", ModelConfig(path=str(tmp_path / "judge")), RolloutConfig(engine="huggingface"), 0, max_model_length=32
    )
    settings = JudgeSettings(base_url="", model="judge", prompt="{response}?", max_retries=0)
    grader = Grader(name="critic", kind="judge", backend=settings)
    loop = RewardLoop([grader], 1, build_backends([grader], 1))
    try:
        found = loop.finish("b", [sample(0, "good"), sample(1, "bad"), sample(2, "x" * 60)], 60.0).grades
    finally:
        loop.close()
        worker.close()
        SERVED_HERE.pop("critic")
    assert [found[row]["critic"].score for row in (0, 1)] == [1.0, 0.2]
    assert found[2]["critic"].cause == "error"  # longer than the judge's context
