"""A user's program plays the episodes of a rollout, each in a process of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.problems import ConfigError
from resources.client_episodes import AgentError, ClientEpisodes, check_agent
from resources.engines.base import Sampling
from resources.engines.huggingface import HuggingFaceEngine
from resources.graders import FinishedRow
from resources.models.causal_lm import load_tokenizer, prepare_model_folder
from resources.openai_endpoint import OpenAiEndpoint, Terms
from resources.prompts import Prompt
from resources.replicas import LocalReplica
from resources.request_serving import ServesRequests
from resources.rollout_rows import RolloutRow, records_of, requests_of
from resources.rollout_servers import RolloutServers
from tasks.algorithms.diagnostics import finish_metrics
from tasks.replies import add_sums
from tests.resources.workers.tiny import MODEL
from tests.tasks.local_cast import small_config

SAMPLING = Sampling(stop_token_ids=(2,))


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiEndpoint]:
    folder: Path = prepare_model_folder(MODEL, 0, tmp_path_factory.mktemp("cache"))
    worker = ServesRequests()
    worker.engine = HuggingFaceEngine(str(folder), dtype="float32", slots=8)
    servers = RolloutServers([LocalReplica("a", worker)])
    terms = Terms(seed=5, sampling=SAMPLING, max_tokens=24)
    endpoint = OpenAiEndpoint(servers, load_tokenizer(MODEL), terms, max_model_length=64)
    yield endpoint
    endpoint.close()
    servers.close()


def rows(count: int) -> list[RolloutRow]:
    tokenizer = load_tokenizer(MODEL)
    made: list[RolloutRow] = []
    for number in range(count):
        text = f"{number}+1="
        ids = tuple(tokenizer(text)["input_ids"])
        prompt = Prompt(
            ordinal=number, source="sums", index=number, text=text, answer=str(number + 1), extra={}, ids=ids,
            group_size=None,
        )  # fmt: skip
        made.append(RolloutRow(row_id=2 * number, prompt=prompt, group_size=1))
    return made


def play(endpoint: OpenAiEndpoint, agent: str, count: int, seconds: float = 60.0, stream=None):
    episodes = ClientEpisodes(endpoint, f"tests.resources.agents_here:{agent}", processes=2, seconds=seconds)
    try:
        wanted = rows(count)
        return episodes.run(wanted, requests_of(wanted, 0, 0, 12), SAMPLING, "t", stream)
    finally:
        episodes.close()


def test_each_row_is_an_episode_and_its_prompt_is_what_the_data_has(endpoint: OpenAiEndpoint) -> None:
    streamed: list[FinishedRow] = []
    played = play(endpoint, "ask", 6, stream=streamed.extend)
    shard = played.rows.shard()
    assert shard["row_ids"].tolist() == [0, 2, 4, 6, 8, 10]
    assert shard["group_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert shard["prompt_lengths"].tolist() == [len(row.prompt.ids) for row in rows(6)]
    sampled = shard["response_mask"].values()
    starts = shard["input_ids"].offsets()[:-1]
    assert [shard["input_ids"].values()[start : start + 4].tolist() for start in starts] == [
        list(row.prompt.ids) for row in rows(6)
    ]
    assert int(sampled.sum()) == int(shard["response_lengths"].sum())
    # What the agent returned is where grader environment_score reads it, and each row was streamed with it.
    assert all(0.0 <= record["extra"]["environment_score"] <= 1.0 for record in records_of(shard))
    assert {row.row_id for row in streamed} == {0, 2, 4, 6, 8, 10}


def test_the_same_seeds_give_the_same_episodes(endpoint: OpenAiEndpoint) -> None:
    first, second = (play(endpoint, "ask", 4).rows.shard() for _ in range(2))
    assert first["input_ids"].values().tolist() == second["input_ids"].values().tolist()


def test_what_the_agent_wrote_between_is_not_trained(endpoint: OpenAiEndpoint) -> None:
    played = play(endpoint, "ask_again", 3)
    assert played.num_requests == 6
    for output, mask in zip(played.rows.outputs, played.rows.masks, strict=True):
        assert mask.count(False) >= 1  # the question mark, and the end of a turn that had none
        assert all(value == 0.0 for value, own in zip(output.log_probs, mask, strict=True) if not own)
        assert len(output.token_ids) <= 12


def test_an_episode_that_fails_is_left_out_and_told_and_the_others_stay(endpoint: OpenAiEndpoint) -> None:
    played = play(endpoint, "fail_in_turn", 12, seconds=8.0)
    assert [row.row_id for row in played.rows.rows] == [4, 10, 16, 22]
    causes = "\n".join(played.causes)
    rounds = finish_metrics(add_sums([played.metrics, played.metrics]))
    assert (played.metrics["rollout/failed_episodes"], rounds["rollout/failed_episodes"]) == (8.0, 16.0)
    for said in (
        "row 0: tests.resources.agents_here:fail_in_turn raised KeyError: 'board'",
        "row 2: tests.resources.agents_here:fail_in_turn ended its process",
        "row 8: tests.resources.agents_here:fail_in_turn took longer than 8 s",
        "row 14: tests.resources.agents_here:fail_in_turn returned without a request that was answered",
    ):
        assert said in causes


def test_a_rollout_without_one_whole_episode_is_an_error_with_the_cause(endpoint: OpenAiEndpoint) -> None:
    with pytest.raises(AgentError, match=r"all 1 episodes .* failed: row 0: .*KeyError: 'board'"):
        play(endpoint, "fail_in_turn", 1)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tests.resources.agents_here:nobody", "has no function 'nobody'"),
        ("no_such_module:play", "No module named 'no_such_module'"),
    ],
)
def test_an_agent_that_does_not_import_is_refused_by_its_setting(path: str, said: str) -> None:
    config = small_config(
        "rollout.servers.enabled=true", "roles.rollout.colocate=shared", f"rollout.servers.agent={path}"
    )
    with pytest.raises(ConfigError, match=f"rollout.servers.agent is '{path}'.*{said}"):
        check_agent(config)
