"""What a run does about a user's own parts: graders that fail, losses that are no numbers, responses that never end."""

from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.ppo import ppo
from resources.checkpoints import CheckpointStore
from tasks.policies import NanLossError
from tests.chaos.runs import events_of, metrics_of, tiny_config

pytestmark = pytest.mark.slow
PARTS = '''
import time


def moody(index):
    """Of 16 prompts one raises, one hangs, two return nonsense."""
    if index % 16 == 3:
        raise RuntimeError("no verdict")
    if index % 16 == 5:
        time.sleep(600)
    return {7: None, 9: float("nan")}.get(index % 16, 1.0)


def nan_loss(log_probs, entropy, td, **numbers):
    return log_probs.sum() * float("nan"), {}
'''


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the user's module."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "moody_parts.py").write_text(PARTS)
    return folder


def graded(parts: Path, run_dir: Path, name: str, **grader: object) -> RunConfig:
    moody = {"name": "moody", "kind": "python", "function": "moody_parts:moody", "timeout_seconds": 2.0, **grader}
    sources = [{"name": "sorting", "kind": "sorting", "size": 16, "seed": 1, "options": {"num_digits": 3}}]
    return tiny_config(
        run_dir,
        name,
        iterations=2,
        engine="scripted",
        reward={"graders": [moody], "processes": 2},
        data={"sources": sources},
        code={"import_paths": [str(parts)]},
    )


def test_a_grader_that_raises_hangs_or_answers_nonsense_costs_its_rows_alone(
    parts: Path, run_dir: Path, prefect_session: None
):
    ppo(graded(parts, run_dir, "moody"))
    lines = metrics_of(run_dir / "moody")
    assert len(lines) == 2
    for line in lines:
        assert line["reward/unscorable_error"] == 1
        assert line["reward/unscorable_timeout"] == 1
        assert line["reward/unscorable_nonsense"] == 2
        assert line["reward/unscorable_rows"] == 4
        assert line["reward/score_mean"] == 1.0
    assert events_of(run_dir / "moody", "recovered") == []


def test_a_grader_may_end_the_run_which_can_be_resumed(parts: Path, run_dir: Path, prefect_session: None):
    with pytest.raises(Exception, match=r"no verdict|moody"):
        ppo(graded(parts, run_dir, "strict", on_failure="stop"))
    assert metrics_of(run_dir / "strict") == []
    assert events_of(run_dir / "strict", "recovered") == []


def test_a_loss_that_is_no_number_is_skipped_counted_and_ends_the_run_when_it_stays(
    parts: Path, run_dir: Path, prefect_session: None
):
    config = tiny_config(
        run_dir,
        "nan",
        iterations=4,
        engine="scripted",
        algorithm={"loss": "moody_parts:nan_loss"},
        code={"import_paths": [str(parts)]},
        recovery={"max_nan_steps": 4},
        checkpoint={"every": 1, "keep": -1, "asynchronous": False},
    )
    with pytest.raises(NanLossError, match="6 optimizer steps"):
        ppo(config)
    # Two mini-batches an iteration: 2 and 4 steps are skipped, the sixth is too many.
    lines = metrics_of(run_dir / "nan")
    assert [line["actor/skipped_steps"] for line in lines] == [2, 2]
    assert [event["total"] for event in events_of(run_dir / "nan", "nan-loss")] == [2, 4, 6]
    store = CheckpointStore(run_dir / "nan" / "checkpoints")
    actor = [
        {name: value for name, value in store.read(number).checksums.items() if name.startswith("actor/")}
        for number in (1, 2)
    ]
    weights = [name for name in actor[0] if name.endswith(".safetensors")]
    assert weights
    assert [actor[0][name] for name in weights] == [actor[1][name] for name in weights]


def test_a_response_that_never_ends_goes_elsewhere_and_then_drops_its_group(run_dir: Path, prefect_session: None):
    texts = {"3": "9" * 400, "*": "12"}  # at 0.1 s a token the third prompt's responses take 20 s
    config = tiny_config(
        run_dir,
        "stuck",
        "split",
        iterations=2,
        data={"prompts_per_iteration": 8, "sources": [{"name": "sorting", "kind": "sorting", "size": 8, "seed": 1,
                                                       "options": {"num_digits": 3}}]},
        model={"shape": {"num_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
                         "vocab_size": 128, "max_positions": 256}},
        rollout={
            "engine": "scripted",
            "group_size": 2,
            "max_response_length": 200,
            "scripted": {"responses": {"mode": "fixed", "texts": texts, "by_token": True}, "seconds_per_token": 0.1},
            "servers": {"enabled": True, "request_deadline_seconds": 6.0},
            "stuck_response_seconds": 2.0,
        },
    )  # fmt: skip
    ppo(config)
    lines = metrics_of(run_dir / "stuck")
    assert [line["rollout/dropped_groups"] for line in lines] == [1, 1]
    assert [line["reward/unscorable_rows"] for line in lines] == [2, 2]
    assert events_of(run_dir / "stuck", "recovered") == []
