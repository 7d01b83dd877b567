"""Environments in workers of their own, and episodes that talk to them."""

import json
from typing import Any

import pytest
import reasoning_gym

from configs.data import DataConfig, SourceConfig
from configs.pools import PoolConfig
from configs.rollout import RolloutConfig, ScriptedConfig, ToolsConfig
from resources.agent_rollout import build_agent_rollout
from resources.cluster import Cluster
from resources.engines.base import FinishReason, Sampling
from resources.engines.scripted import ScriptedEngine
from resources.environments import EnvironmentPathError, EnvironmentResponder, find_environment
from resources.local_group import LocalGroup
from resources.models.character_tokenizer import build_character_tokenizer
from resources.prompts import Prompt
from resources.rollout_rows import RolloutRow, records_of, requests_of
from resources.worker_group import WorkerSpec, start_group
from resources.workers.env import MAX_MISSES, EnvWorker
from tasks.rewards.environment_score import environment_score
from tests.alone import alone
from tests.resources.environments_here import worker_has_imported_reasoning_gym

TOKENIZER = build_character_tokenizer()
COUNTDOWN = "tests.resources.environments_here:Countdown"
SLOW = "tests.resources.environments_here:Slow"
DATA = DataConfig(sources=(SourceConfig(name="s", kind="calculator"),), prompts_per_iteration=1)


def row(index: int, answer: str = "2") -> RolloutRow:
    ids = tuple(TOKENIZER("go")["input_ids"])
    prompt = Prompt(
        ordinal=index, source="s", index=index, text="go", answer=answer, extra={}, ids=ids, group_size=None
    )
    return RolloutRow(row_id=index, prompt=prompt, group_size=1)


def run(texts: dict[str, str], rows: list[RolloutRow], path: str, group: Any = None, **tools: Any) -> tuple[Any, Any]:
    """`group`: of the env role; two workers in this process when left out."""
    config = RolloutConfig(
        engine="scripted",
        scripted=ScriptedConfig(responses={"mode": "fixed", "texts": texts}),
        max_response_length=80,
        tools=ToolsConfig(environment=path, **{"max_turns": 5, "result_template": "({result})", **tools}),
    )
    agent = build_agent_rollout(config, DATA, TOKENIZER, {2})
    assert agent is not None
    assert config.tools is not None
    facts = (path, config.tools.environment_options, config.tools.timeout_seconds)
    group = group or LocalGroup("env", [EnvWorker(*facts) for _ in range(2)])
    engine = ScriptedEngine(config, vocab_size=128, encode=lambda text: list(TOKENIZER(text)["input_ids"]))
    episodes = agent.run(engine, rows, requests_of(rows, 0, 0, 80), Sampling(stop_token_ids=(2,)), group)
    return episodes, agent.shard(rows, episodes, 0)


def test_an_episode_talks_to_its_environment_until_that_ends_it() -> None:
    texts = {"0/1": "2", "0/2": "1", "1/1": "3", "1/2": "x", "1/3": "1"}
    episodes, shard = run(texts, [row(0, "2"), row(1, "3")], COUNTDOWN)
    said = [TOKENIZER.decode(episode.ids, skip_special_tokens=True) for episode in episodes]
    assert said == ["2(1 left)1", "3(2 left)x(1 left)1"]
    assert [episode.score for episode in episodes] == [1.0, pytest.approx(2 / 3)]
    assert [record["extra"]["environment_score"] for record in records_of(shard)] == [1.0, pytest.approx(2 / 3)]
    mask = shard["response_mask"].unbind()[0].tolist()
    assert mask == [False] * 2 + [True] * 2 + [False] * 8 + [True] * 2  # what the environment said is not trained


def test_the_grader_reads_the_score_and_a_failed_environment_is_unscorable() -> None:
    assert environment_score("", "", "", {"environment_score": 0.25}).value == 0.25
    assert environment_score("", "", "", {"environment_score": None}).value is None
    with pytest.raises(ValueError, match=r"needs rollout\.tools\.environment, .* rollout\.servers\.agent"):
        environment_score("", "", "", {})


def test_an_environment_that_raises_ends_its_own_episode_alone() -> None:
    texts = {"*": "a"}
    episodes, shard = run(texts, [row(0), row(1)], "tests.resources.environments_here:Broken")
    assert [episode.score for episode in episodes] == [None, None]
    assert [episode.num_errors for episode in episodes] == [1, 1]
    assert [episode.reason for episode in episodes] == [FinishReason.STOP] * 2
    assert int(shard["response_mask"].values().sum()) == 8


def test_an_environment_that_gives_no_number_ends_its_own_episode_alone() -> None:
    episodes, _ = run({"*": "a"}, [row(0), row(1)], "tests.resources.environments_here:Unsure")
    assert [episode.score for episode in episodes] == [None, None]


def test_the_import_of_reasoning_gym_is_paid_by_no_step() -> None:
    assert alone(worker_has_imported_reasoning_gym, "reasoning_gym:basic_arithmetic")
    assert not alone(worker_has_imported_reasoning_gym, SLOW)


def test_a_step_that_never_returns_ends_its_own_episode_alone() -> None:
    episodes, _ = run({"*": "a"}, [row(0, "30"), row(1, "0"), row(2, "0"), row(3, "0")], SLOW, timeout_seconds=0.5)
    assert [episode.score for episode in episodes] == [None, 1.0, 1.0, 1.0]
    assert [episode.num_errors for episode in episodes] == [1, 0, 0, 0]
    assert [episode.reason for episode in episodes] == [FinishReason.STOP] * 4


def test_where_all_steps_hang_only_the_first_few_are_waited_for() -> None:
    worker = EnvWorker(SLOW, timeout_seconds=0.05)
    hung = [(n, 1, "a", b'{"answer": 30}') for n in range(MAX_MISSES + 20)]
    said = list(worker.step(hung).values())
    assert said[:MAX_MISSES] == [("error: no answer within 0.05 s", None, True)] * MAX_MISSES
    assert said[MAX_MISSES:] == [("error: not tried: 8 steps before it gave nothing in 0.05 s", None, True)] * 20
    assert worker.step([(0, 1, "a", b'{"answer": 0}')]) == {0: ("done", 1.0, True)}  # the next call is tried again


def test_an_environment_that_asks_to_end_the_process_ends_its_own_episode_alone() -> None:
    worker = EnvWorker("tests.resources.environments_here:Leaving")
    assert worker.step([(0, 1, "a", b"{}")]) == {0: ("error: SystemExit: 3", None, True)}


def test_a_batch_of_steps_may_take_longer_than_one_and_its_group_outlives_a_step_that_hangs(cluster: Cluster) -> None:
    """Fifty steps of a tenth of a second in one worker, each of which may take one second; the last never returns."""
    cluster.reserve({"main": PoolConfig(bundles=1)})
    spec = WorkerSpec(role="env", worker=EnvWorker, args=(SLOW, {}, 1.0), rendezvous=False, call_seconds=60.0)
    group = start_group(cluster, cluster.pools["main"], spec)
    rows = [*(row(index, "0.1") for index in range(50)), row(50, "600")]
    episodes, _ = run({"*": "a"}, rows, SLOW, group, timeout_seconds=1.0)
    assert [episode.score for episode in episodes] == [1.0] * 50 + [None]
    again, _ = run({"*": "a"}, [row(51, "0")], SLOW, group, timeout_seconds=1.0)
    assert [episode.score for episode in again] == [1.0]
    assert (group.failure, group.incarnation) == (None, 1)


def test_turns_of_a_group_stay_with_one_worker() -> None:
    workers = [EnvWorker(COUNTDOWN), EnvWorker(COUNTDOWN)]
    group: Any = LocalGroup("env", workers)
    responder = EnvironmentResponder(group)
    from resources.agent_loop import Turn

    record = json.dumps({"answer": "3"}).encode()
    turns = [Turn(row_id=n, group_id=n, number=1, text="3", record=record) for n in range(4)]
    answers = responder.respond(turns)
    assert [answer.texts for answer in answers] == [("2 left",)] * 4
    assert [sorted(worker._open) for worker in workers] == [[0, 2], [1, 3]]


def test_options_reach_the_environment_and_wrong_paths_are_named() -> None:
    made: Any = find_environment(COUNTDOWN, {"say": "remain"})()
    assert made.say == "remain"
    with pytest.raises(EnvironmentPathError, match="has no function or class 'Chess'"):
        find_environment("tests.resources.environments_here:Chess", {})
    with pytest.raises(EnvironmentPathError, match="does not import"):
        find_environment("no_such_module:Env", {})
    with pytest.raises(EnvironmentPathError, match=r"cannot be made with options \{'moves': 3\}: .* 'moves'"):
        find_environment(COUNTDOWN, {"moves": 3})


def test_reasoning_gym_scores_attempts_with_its_own_verifier() -> None:
    entry = next(iter(reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=3)))
    record = {"extra": {"dataset": "basic_arithmetic", "entry": entry}}
    environment = find_environment("reasoning_gym:basic_arithmetic", {"attempts": 2})()
    environment.reset(record)
    text, score, has_ended = environment.step("no idea")
    assert (text, has_ended) == ("\nWrong, try again.\n", False)
    assert score < 1.0
    _, score, has_ended = environment.step(f"<answer>{entry['answer']}</answer>")
    assert (score, has_ended) == (1.0, True)
    with pytest.raises(ValueError, match="the row is of data set 'chess'"):
        find_environment("reasoning_gym:basic_arithmetic", {})().reset({"extra": {"dataset": "chess"}})
