"""A stock OpenAI client drives episodes over loopback; what it sampled is what the actor trains on."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import BadRequestError, NotFoundError, OpenAI

from resources.engines.base import FinishReason, Sampling
from resources.engines.huggingface import HuggingFaceEngine
from resources.models.causal_lm import load_tokenizer, prepare_model_folder
from resources.openai_endpoint import EndpointError, OpenAiEndpoint, Terms
from resources.openai_episodes import EpisodeLog, EpisodeRows
from resources.openai_requests import BadRequest, check_sampling
from resources.prompts import Prompt
from resources.replicas import LocalReplica
from resources.request_serving import ServesRequests
from resources.requests_on_the_way import Completion
from resources.rollout_rows import RolloutRow
from resources.rollout_servers import RolloutServers
from tasks.algorithms.objectives import actor_objective
from tests.resources.workers.tiny import MODEL, actor, plans, weights_of

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


TERMS = Terms(seed=5, sampling=Sampling(stop_token_ids=(2,)), max_tokens=60)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiEndpoint]:
    folder: Path = prepare_model_folder(MODEL, 0, tmp_path_factory.mktemp("cache"))
    worker = ServesRequests()
    worker.engine = HuggingFaceEngine(str(folder), dtype="float32", slots=8)
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = CHAT
    servers = RolloutServers([LocalReplica("a", worker)])
    endpoint = OpenAiEndpoint(servers, tokenizer, TERMS, max_model_length=64)
    yield endpoint
    endpoint.close()
    servers.close()


def client(endpoint: OpenAiEndpoint, episode: str) -> OpenAI:
    endpoint.open(episode, TERMS)
    return OpenAI(base_url=endpoint.url_of(episode), api_key="unused", max_retries=0, timeout=60.0)


def say(openai: OpenAI, messages: list[Any], **options: Any) -> Any:
    return openai.chat.completions.create(model="policy", messages=messages, **{"max_tokens": 6, **options})


def test_an_episode_driven_by_a_stock_client_is_trained_on(endpoint: OpenAiEndpoint) -> None:
    messages: list[Any] = [{"role": "user", "content": "7+5="}]
    with client(endpoint, "train") as openai:
        first = say(openai, messages)
        messages += [first.choices[0].message, {"role": "user", "content": "?"}]
        second = say(openai, messages)
    assert second.usage.prompt_tokens > first.usage.total_tokens
    branches = endpoint.close_episode("train")
    assert len(branches) == 1
    assert branches[0].num_calls == 2

    prompt = Prompt(ordinal=3, source="s", index=3, text="7+5=", answer="12", extra={}, ids=(1,), group_size=None)
    episode = EpisodeRows()
    episode.add(RolloutRow(row_id=30, prompt=prompt, group_size=1), branches)
    shard = episode.shard()
    assert shard["group_ids"].tolist() == [3]
    mask = shard["response_mask"].values()
    assert int(mask.sum()) == first.usage.completion_tokens + second.usage.completion_tokens
    assert set(shard["token_versions"].values()[mask].tolist()) == {0}
    worker = actor()
    scored, before = worker.compute_log_probs(shard)[1], weights_of(worker)
    # The engine sampled with these very weights: its log-probs are the actor's, token by token, over both turns.
    torch.testing.assert_close(
        shard["rollout_log_probs"].values()[mask], scored["old_log_probs"].values()[mask], atol=2e-4, rtol=0
    )
    shard["old_log_probs"] = scored["old_log_probs"]
    shard["advantages"] = torch.nested.nested_tensor_from_jagged(mask.float(), shard["input_ids"].offsets())
    loss = functools.partial(actor_objective, policy_loss="distillation", aggregation="token-mean")
    metrics = worker.update(shard, plans(shard)[0], loss)["metrics"]
    assert metrics["actor/grad_norm"] > 0
    assert any(bool((before[name] != now).any()) for name, now in weights_of(worker).items())


def test_the_ids_of_an_answer_are_kept_although_its_text_reads_otherwise(endpoint: OpenAiEndpoint) -> None:
    """Special tokens leave the text; the next prompt still has them, since the answer is never encoded again."""
    messages: list[Any] = [{"role": "user", "content": "ab"}]
    with client(endpoint, "ids") as openai:
        first = say(openai, messages)
        answer = first.choices[0]
        messages += [{"role": "assistant", "content": answer.message.content}, {"role": "user", "content": "c"}]
        say(openai, messages)
    (branch,) = endpoint.close_episode("ids")
    sampled = [piece.token for piece in answer.logprobs.content]
    tokenizer = load_tokenizer(MODEL)
    start = branch.prompt_length
    assert [tokenizer.decode([token]) for token in branch.ids[start : start + len(sampled)]] == sampled
    ended = sampled[-1] == "<eos>"
    behind = str(tokenizer.decode(branch.ids[start + len(sampled) :][: 12 + (not ended) * 1]))
    assert behind.startswith("<user>c<eos>" if ended else "<eos><user>c")


@pytest.mark.parametrize(
    ("written", "last", "reason", "behind"),
    [
        ("<end_of_turn>", "<end_of_turn>", FinishReason.STOP, ""),
        ("<eos>", "<eos>", FinishReason.STOP, ""),
        ("<eos>", "<end_of_turn>", FinishReason.STOP, "<eos>"),
        ("<end_of_turn>", "8", FinishReason.LENGTH, "<end_of_turn>"),
    ],
)
def test_the_end_of_a_turn_stands_once_whichever_token_the_model_ended_it_with(
    written: str, last: str, reason: FinishReason, behind: str
) -> None:
    tokenizer = load_tokenizer(MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    tokenizer.chat_template = CHAT.replace("<eos>", written)
    log, text = EpisodeLog(tokenizer), [{"role": "user", "content": "1"}]
    answer = Completion(
        row_id=0, token_ids=(7, int(tokenizer.convert_tokens_to_ids(last))), log_probs=(-0.5, -0.5), versions=(3, 3),
        finish_reason=reason, seconds=0.0, replica="a", dispatches=1,
    )  # fmt: skip
    log.finish(log.begin("e", text), answer, {"role": "assistant", "content": "x"})
    opening = log.begin("e", [*text, {"role": "assistant", "content": "x"}, {"role": "user", "content": "2"}])
    assert tokenizer.decode(opening.ids[opening.known :]) == f"{behind}<user>2{written}<a>"


def test_an_edited_conversation_begins_a_branch_and_both_are_kept(endpoint: OpenAiEndpoint) -> None:
    with client(endpoint, "fork") as openai:
        say(openai, [{"role": "user", "content": "1"}])
        say(openai, [{"role": "user", "content": "2"}])
    branches = endpoint.close_episode("fork")
    assert [branch.num_calls for branch in branches] == [1, 1]
    assert endpoint.close_episode("fork") == []


def test_plain_completions_take_text_or_ids_and_go_on_from_ids(endpoint: OpenAiEndpoint) -> None:
    with client(endpoint, "plain") as openai:
        first = openai.completions.create(model="policy", prompt="12=", max_tokens=3)
        assert first.usage is not None
        assert first.usage.completion_tokens <= 3
        (branch,) = endpoint.log._branches["plain"]
        openai.completions.create(model="policy", prompt=[*branch.ids, 5], max_tokens=3)
    (branch,) = endpoint.close_episode("plain")
    assert branch.num_calls == 2
    assert branch.mask.count(False) == 4  # three of the prompt, one that was added


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.2}, "temperature is 0.2 and the run samples at 1.0"),
        (
            {"top_p": 0.9},
            "top_p is 0.9 and the run samples at 1.0; log-probs are of that distribution, so leave it out",
        ),
        ({"extra_body": {"top_k": 20}}, "top_k is 20 and the run samples at 0"),
        ({"extra_body": {"min_p": 0.1}}, "min_p is 0.1 and the run samples at 0.0"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty is not served"),
        ({"presence_penalty": 0.5}, "presence_penalty is not served: .*; leave 0.5 out"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not served"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not served"),
        ({"response_format": {"type": "json_object"}}, "response_format is not served"),
        ({"tool_choice": "required"}, "tool_choice is not served"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos is not served"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs is not served"),
        ({"stream": True}, "stream is not served"),
        ({"n": 2}, "n is not served"),
        ({"stop": ["x"]}, "stop is not served: what is sampled here is trained"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "x" * 90}]}, "the context holds 64 and .*nothing is left"),
    ],
)
def test_what_would_break_the_log_probs_or_the_context_is_refused(
    endpoint: OpenAiEndpoint, options: dict[str, Any], said: str
) -> None:
    given = {"messages": [{"role": "user", "content": "1"}], **options}
    with client(endpoint, "bad") as openai, pytest.raises(BadRequestError, match=said):
        openai.chat.completions.create(model="policy", **given)


def test_values_that_leave_the_distribution_as_it_is_are_answered(endpoint: OpenAiEndpoint) -> None:
    with client(endpoint, "neutral") as openai:
        say(
            openai, [{"role": "user", "content": "1"}], temperature=1, top_p=1, n=1, presence_penalty=0, stop=[],
            logit_bias={}, seed=3, response_format={"type": "text"}, stream=False, tool_choice="auto",
            extra_body={"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "best_of": None, "ignore_eos": False},
        )  # fmt: skip
    assert len(endpoint.close_episode("neutral")) == 1


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_p": 0.9, "top_k": 40, "temperature": 0.7}])
def test_a_client_that_names_the_runs_own_distribution_is_answered(options: dict[str, Any]) -> None:
    own = Sampling(temperature=0.7, top_p=0.9, top_k=40)
    check_sampling(options, own)
    with pytest.raises(BadRequest, match=r"top_p is 1\.0 and the run samples at 0\.9"):
        check_sampling({**options, "top_p": 1.0}, own)
    check_sampling({"temperature": 0.0, "top_p": 0.5}, Sampling(temperature=0.7, greedy=True))
    with pytest.raises(BadRequest, match=r"temperature is 0\.7 and the run samples at 0\.0"):
        check_sampling({"temperature": 0.7}, Sampling(temperature=0.7, greedy=True))


CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": ["hi"]}, "messages.0 is 'hi'; it is an object like"),
        ({"messages": "hi"}, "messages is 'hi'; it is a list of objects"),
        ({"messages": None}, "messages is empty; give at least one"),
        ({"messages": [{"content": "1"}]}, "messages.0.role is None; it is a text like user"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content is 5; it is a text, or a list of parts"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0 is 'a'; it is an object like"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the policy reads text alone"),
        ({"messages": [{"role": "user", "content": "1", "name": 3}]}, "messages.0.name is 3; it is a text"),
        ({"messages": [{**CALL, "tool_calls": 3}]}, "messages.0.tool_calls is 3; it is a list of objects"),
        ({"messages": [{**CALL, "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0.function is None"),
        ({"tools": 3}, "tools is 3; it is a list of objects"),
        ({"tools": ["f"]}, "tools.0 is 'f'; it is an object"),
        ({"max_tokens": [1]}, "max_tokens is [1]; it is a whole number from 1 on"),
        ({"max_tokens": 0}, "max_tokens is 0; it is a whole number from 1 on"),
        ({"max_completion_tokens": 2.5}, "max_completion_tokens is 2.5; it is a whole number"),
        ({"seed": "a"}, "seed is 'a'; it is a whole number"),
        ({"seed": [1]}, "seed is [1]; it is a whole number"),
        ([1], "the body is no JSON object"),
        (b"{", "the body is no JSON: "),
        (b"[" * 100_000, "the body is nested too deep"),
    ],
)
def test_a_request_that_is_malformed_is_answered_with_the_rule(endpoint: OpenAiEndpoint, body: Any, said: str) -> None:
    if isinstance(body, dict):
        body = {"messages": [{"role": "user", "content": "1"}], **body}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"http://127.0.0.1:{endpoint.port}/v1/chat/completions", content=raw, trust_env=False)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [[True], ["a"], [[1]], 5, ""])
def test_a_prompt_that_is_neither_a_text_nor_ids_is_refused(endpoint: OpenAiEndpoint, prompt: Any) -> None:
    url = f"http://127.0.0.1:{endpoint.port}/v1/completions"
    answer = httpx.post(url, json={"prompt": prompt}, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400, "prompt is one text or one list of token ids",
    )  # fmt: skip


def test_parts_of_text_are_read_as_one_text(endpoint: OpenAiEndpoint) -> None:
    parts = [{"type": "text", "text": "7+"}, {"type": "text", "text": "5="}]
    with client(endpoint, "parts") as openai:
        say(openai, [{"role": "user", "content": parts}])
        say(openai, [{"role": "user", "content": "7+5="}])
    one, other = endpoint.close_episode("parts")
    assert one.ids[: one.prompt_length] == other.ids[: other.prompt_length]


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ 1 + messages[0]['content'] }}"]
)
def test_what_the_models_template_refuses_is_the_clients_mistake(
    endpoint: OpenAiEndpoint, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint._tokenizer, "chat_template", template)
    with client(endpoint, "template") as openai, pytest.raises(BadRequestError, match="chat template takes no such"):
        say(openai, [{"role": "user", "content": "1"}])


def test_the_endpoint_listens_on_loopback_alone_and_lists_its_model(endpoint: OpenAiEndpoint) -> None:
    assert endpoint.url_of("x").startswith("http://127.0.0.1:")
    with client(endpoint, "models") as openai:
        assert [model.id for model in openai.models.list()] == ["policy"]


def test_two_requests_that_go_on_from_the_same_ids_share_no_trained_token(endpoint: OpenAiEndpoint) -> None:
    """The second to be answered is a conversation whose prompt holds everything before, not trained again."""
    log, text = endpoint.log, [{"role": "user", "content": "1"}]
    answer = Completion(
        row_id=0, token_ids=(7, 8), log_probs=(-0.5, -0.5), versions=(3, 3), finish_reason=FinishReason.LENGTH,
        seconds=0.0, replica="a", dispatches=1,
    )  # fmt: skip
    log.finish(log.begin("both", text), answer, {"role": "assistant", "content": "x"})
    text += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "2"}]
    left, right = log.begin("both", text), log.begin("both", text)
    log.finish(left, answer, {"role": "assistant", "content": "x"})
    log.finish(right, answer, {"role": "assistant", "content": "x"})
    one, other = log.take("both")
    assert one.mask.count(True) == 4
    assert other.mask.count(True) == 2
    assert other.prompt_length == len(other.ids) - 2
    assert one.ids == other.ids


def test_a_refused_request_leaves_nothing_in_the_conversation(endpoint: OpenAiEndpoint) -> None:
    with client(endpoint, "full") as openai:
        messages: list[Any] = [{"role": "user", "content": "1"}]
        messages += [say(openai, messages).choices[0].message]
        (before,) = [list(branch.ids) for branch in endpoint.log._branches["full"]]
        with pytest.raises(BadRequestError, match="nothing is left"):
            say(openai, [*messages, {"role": "user", "content": "x" * 90}])
    (branch,) = endpoint.close_episode("full")
    assert branch.ids == before


def test_an_episode_ends_and_an_answer_that_comes_later_is_not_kept(endpoint: OpenAiEndpoint) -> None:
    with client(endpoint, "ended") as openai:
        endpoint.close_episode("ended")
        with pytest.raises(NotFoundError, match="episode 'ended' is not open"):
            say(openai, [{"role": "user", "content": "1"}])


def test_visitors_may_talk_to_the_policy_and_nothing_is_kept(endpoint: OpenAiEndpoint) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{endpoint.port}/v1", api_key="unused", max_retries=0) as openai:
        assert say(openai, [{"role": "user", "content": "1"}]).usage.completion_tokens >= 1
    assert endpoint.close_episode("") == []


def test_the_same_question_twice_is_sampled_twice(endpoint: OpenAiEndpoint) -> None:
    with client(endpoint, "twice") as openai:
        answers = {
            say(openai, [{"role": "user", "content": "1"}], max_tokens=20).choices[0].message.content for _ in range(3)
        }
    assert len(answers) > 1
    assert len(endpoint.close_episode("twice")) == 3


def test_a_taken_port_is_refused_by_its_setting(endpoint: OpenAiEndpoint) -> None:
    with pytest.raises(EndpointError, match=f"rollout.servers.openai_port is {endpoint.port}"):
        OpenAiEndpoint(endpoint._servers, endpoint._tokenizer, TERMS, max_model_length=64, port=endpoint.port)
