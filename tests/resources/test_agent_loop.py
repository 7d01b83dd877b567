"""Episodes on token ids: what is sampled is kept as it is, what is read is masked, and budgets end an episode."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.data import DataConfig, SourceConfig
from configs.rollout import RolloutConfig, ScriptedConfig, ToolsConfig
from resources.agent_loop import Answer, Turn
from resources.agent_rollout import AgentRollout, build_agent_rollout, episode_metrics
from resources.engines.base import FinishReason, GenerationOutput, GenerationRequest, Sampling
from resources.engines.scripted import ScriptedEngine
from resources.graders import FinishedRow
from resources.models.character_tokenizer import build_character_tokenizer
from resources.prompts import Prompt
from resources.rollout_rows import RolloutRow
from resources.tools.answers import AnswerEncoder
from resources.tools.schema import ToolError
from tasks.algorithms.advantages import gae

TOKENIZER = build_character_tokenizer()
EOS = 2
DATA = DataConfig(sources=(SourceConfig(name="s", kind="calculator"),), prompts_per_iteration=1)
TOOLS: dict[str, Any] = {
    "functions": ("resources.tools.calculator:calculate",), "notation": "inline", "result_template": "<{result}>"
}  # fmt: skip


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def parts(texts: dict[str, str], *, max_tokens: int = 60, **tools: Any) -> tuple[AgentRollout, ScriptedEngine]:
    script = ScriptedConfig(responses={"mode": "fixed", "texts": texts})
    config = RolloutConfig(
        engine="scripted", scripted=script, max_response_length=max_tokens, tools=ToolsConfig(**{**TOOLS, **tools})
    )
    agent = build_agent_rollout(config, DATA, TOKENIZER, {EOS})
    assert agent is not None
    return agent, ScriptedEngine(config, vocab_size=128, encode=ids)


def row(index: int, text: str = "1+1=") -> RolloutRow:
    prompt = Prompt(
        ordinal=index, source="s", index=index, text=text, answer="2", extra={}, ids=tuple(ids(text)), group_size=None
    )
    return RolloutRow(row_id=index, prompt=prompt, group_size=1)


def run(agent: AgentRollout, engine: ScriptedEngine, rows: list[RolloutRow], stream: Any = None) -> list[Any]:
    requests = [
        GenerationRequest(
            row_id=r.row_id,
            prompt_ids=r.prompt.ids,
            seed=7,
            max_tokens=agent.dialogue.max_tokens,
            prompt_index=r.prompt.index,
        )
        for r in rows
    ]
    return agent.run(engine, rows, requests, Sampling(stop_token_ids=(EOS,)), None, stream)


def test_a_tool_call_is_answered_behind_the_ids_that_were_sampled() -> None:
    agent, engine = parts({"0/1": "[calculate(2*3)]", "0/2": "6"})
    (episode,) = run(agent, engine, [row(0)])
    assert episode.ids == [*ids("[calculate(2*3)]"), *ids("<6>"), *ids("6"), EOS]
    assert episode.mask == [True] * 16 + [False] * 3 + [True] * 2
    assert episode.reason is FinishReason.STOP
    assert (episode.num_turns, episode.num_calls, episode.num_errors) == (2, 1, 0)


def test_log_probs_are_of_sampled_tokens_alone_and_the_shard_masks_what_was_read() -> None:
    agent, engine = parts({"0/1": "[calculate(2*3)]", "0/2": "6"})
    rows = [row(0)]
    episodes = run(agent, engine, rows)
    shard = agent.shard(rows, episodes, 3)
    mask, log_probs = shard["response_mask"].values(), shard["rollout_log_probs"].values()
    assert mask.tolist() == [False] * 4 + episodes[0].mask
    assert bool((log_probs[mask] < 0).all())
    assert not log_probs[~mask].any()
    assert shard["response_lengths"].tolist() == [21]  # tool tokens included
    assert shard["prompt_lengths"].tolist() == [4]


def test_graders_get_the_policys_own_tokens_and_never_the_tools() -> None:
    """A leaked answer earns nothing: response [calculate(2*3)] then 7, the tool's 6 is not among the ids."""
    agent, engine = parts({"0/1": "[calculate(2*3)]", "0/2": "7"})
    seen: list[FinishedRow] = []
    run(agent, engine, [row(0)], seen.extend)
    assert TOKENIZER.decode(seen[0].response_ids, skip_special_tokens=True) == "[calculate(2*3)]7"
    assert seen[0].response_length == 21


def test_sampled_ids_are_never_encoded_again() -> None:
    """Ids that no tokenizer would give for their text survive: <unk> (3) reads as text of several tokens."""
    agent, engine = parts({"0/1": "x", "0/2": "6"})
    odd = [3, *ids("[calculate(1+1)]")]
    encode = engine._encode
    engine._encode = lambda text: odd if text == "x" else encode(text)  # pyright: ignore[reportOptionalCall]
    (episode,) = run(agent, engine, [row(0)])
    assert episode.ids[: len(odd)] == odd
    assert episode.ids[len(odd) :] == [*ids("<2>"), *ids("6"), EOS]


def test_errors_are_read_as_text_and_the_episode_goes_on() -> None:
    agent, engine = parts({"0/1": "[fly(1)]", "0/2": "2"}, max_tool_tokens=5)
    (cut,) = run(agent, engine, [row(0)])
    assert TOKENIZER.decode(cut.ids[8:15]) == "<error>"  # five tokens of the result, and what stands around it
    agent, engine = parts(
        {"0/1": "[fly(1)]", "0/2": "[calculate(1/0)]", "0/3": "2"}, max_tool_tokens=200, max_turns=3, max_tokens=200
    )
    (episode,) = run(agent, engine, [row(0)])
    text = TOKENIZER.decode(episode.ids)
    assert "<error: there is no tool 'fly'; tools are calculate>" in text
    assert "<error: ValueError: division by zero>" in text
    assert (episode.num_calls, episode.num_errors, episode.reason) == (2, 2, FinishReason.STOP)


def test_a_turn_whose_calls_all_hang_is_told_so_and_the_run_goes_on() -> None:
    tools = {"functions": ("tests.resources.tools_here:never",), "timeout_seconds": 0.5, "max_tool_tokens": 200}
    agent, engine = parts({"0/1": "[never(1)]" * 8, "0/2": "2", "1/1": "3"}, max_tokens=900, **tools)
    (hung, quick) = run(agent, engine, [row(0), row(1)])
    assert TOKENIZER.decode(hung.ids).count("<error: no answer within 0.5 s>") == 8
    assert (hung.num_calls, hung.num_errors, hung.reason) == (8, 8, FinishReason.STOP)
    assert TOKENIZER.decode(quick.ids, skip_special_tokens=True) == "3"


def test_calls_that_take_turns_are_waited_for_as_long_as_they_go_on() -> None:
    """Six of half a second each, one after the other: the last one ends a second after the first one's deadline."""
    tools = {"functions": ("tests.resources.tools_here:in_turn",), "timeout_seconds": 2.0, "max_tool_tokens": 200}
    agent, engine = parts({"0/1": "[in_turn(1)]" * 6, "0/2": "2"}, max_tokens=900, **tools)
    (episode,) = run(agent, engine, [row(0)])
    assert (episode.num_calls, episode.num_errors, episode.reason) == (6, 0, FinishReason.STOP)


def test_the_turn_budget_ends_an_episode_that_never_answers() -> None:
    agent, engine = parts({"*": "[calculate(1+1)]"}, max_turns=2, max_tokens=200)
    (episode,) = run(agent, engine, [row(0)])
    assert episode.num_turns == 2
    assert episode.reason is FinishReason.LENGTH
    assert episode.mask[-1]  # nothing is read that nobody answers to


def test_the_token_budget_counts_what_is_read_and_leaves_no_half_answer() -> None:
    agent, engine = parts({"*": "[calculate(1+1)]"}, max_turns=9, max_tokens=20)
    (episode,) = run(agent, engine, [row(0)])
    assert len(episode.ids) == 20  # 16 sampled, 3 read, 1 sampled
    assert episode.mask == [True] * 16 + [False] * 3 + [True]
    agent, engine = parts({"*": "[calculate(1+1)]"}, max_turns=9, max_tokens=18)
    (episode,) = run(agent, engine, [row(0)])
    assert (len(episode.ids), episode.reason) == (16, FinishReason.LENGTH)  # the answer would not fit


def test_a_bracket_that_ends_no_call_does_not_end_the_turn() -> None:
    agent, engine = parts({"0/1": "12]", "0/2": "34"})
    (episode,) = run(agent, engine, [row(0)])
    assert TOKENIZER.decode(episode.ids[:-1]) == "12]34"
    assert all(episode.mask)
    assert episode.num_turns == 1


def test_many_episodes_of_different_lengths_all_end_and_are_counted() -> None:
    texts = {f"{index}/1": f"[calculate({index}+1)]" for index in range(0, 12, 2)} | {"*": "5"}
    agent, engine = parts(texts)
    episodes = run(agent, engine, [row(index) for index in range(12)])
    assert [episode.row_id for episode in episodes] == list(range(12))
    assert [episode.num_calls for episode in episodes] == [1, 0] * 6
    metrics = episode_metrics(episodes)
    assert metrics["rollout/calls_mean"] / metrics["rollout/calls_mean/count"] == 0.5
    assert metrics["rollout/turns_mean"] == 18.0


@pytest.mark.parametrize(("sampled", "num_left"), [((), 0), (ids("6"), 20)])
def test_an_episode_that_is_lost_in_its_second_turn_has_no_token_left_and_a_cut_one_keeps_its(
    sampled: Sequence[int], num_left: int
) -> None:
    """16 sampled, 3 read, and then nobody answers, or the answer is cut behind its first token."""
    agent, engine = parts({"0/1": "[calculate(2*3)]", "0/2": "6", "1/1": "5"})
    step, seen = engine.step, []

    def losing() -> list[GenerationOutput]:
        cut = {"token_ids": tuple(sampled), "log_probs": (-1.0,) * len(sampled), "finish_reason": FinishReason.ABORT}
        return [replace(output, **cut) if output.token_ids == (*ids("6"), EOS) else output for output in step()]

    engine.step = losing
    rows = [row(0), row(1)]
    episodes = run(agent, engine, rows, seen.extend)
    assert [(len(episode.ids), episode.reason) for episode in episodes] == [
        (num_left, FinishReason.ABORT), (2, FinishReason.STOP),
    ]  # fmt: skip
    assert {one.row_id: one.is_lost for one in seen} == {0: not sampled, 1: False}
    shard = agent.shard(rows, episodes, 3)
    assert shard["response_lengths"].tolist() == [num_left, 2]
    assert [int(mask.sum()) for mask in shard["response_mask"].unbind()] == [17 if sampled else 0, 2]


def test_each_turn_draws_noise_of_its_own() -> None:
    agent, engine = parts({"0/1": "[calculate(2*3)]", "0/2": "6"})
    (episode,) = run(agent, engine, [row(0)])
    assert episode.log_probs[0] != episode.log_probs[-2]


def test_an_environment_without_a_group_is_refused() -> None:
    agent, engine = parts({"*": "5"}, functions=(), environment="somewhere:Env")
    with pytest.raises(ValueError, match="no group of the env role was handed over"):
        run(agent, engine, [row(0)])


def test_gae_skips_what_was_read() -> None:
    """rewards [0 0 0 0 1], values [.2 .3 7 7 .4], mask [1 1 0 0 1], gamma .9, lambda .8: one decay a sampled token."""
    rewards, values = torch.tensor([[0.0, 0, 0, 0, 1]]), torch.tensor([[0.2, 0.3, 7, 7, 0.4]])
    mask = torch.tensor([[True, True, False, False, True]])
    advantages, _ = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    torch.testing.assert_close(advantages, torch.tensor([[0.42424, 0.492, 0.0, 0.0, 0.6]]), atol=1e-5, rtol=0)


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_chat_template_writes_what_follows_the_turn_and_nothing_before_it() -> None:
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = CHAT
    encoder = AnswerEncoder(tokenizer, max_tokens=10, chat_role="tool")
    assert tokenizer.decode(encoder(["42"], EOS)) == "\n<tool>42<eos>\n<assistant>"
    assert tokenizer.decode(encoder(["42"], None)) == "<eos>\n<tool>42<eos>\n<assistant>"


@pytest.mark.parametrize(
    ("written", "sampled", "behind"),
    [
        ("<end_of_turn>", "<end_of_turn>", "\n"),
        (" <end_of_turn>", "<end_of_turn>", "\n"),
        (" <eos>", "<eos>", "\n"),
        ("<eos>", "<end_of_turn>", "\n"),
        ("<end_of_turn>", "<eos>", "<end_of_turn>\n"),
        ("<end_of_turn><eos>", "<end_of_turn>", "<eos>\n"),
        ("<end_of_turn>", None, "<end_of_turn>\n"),
    ],
)
def test_the_end_of_a_turn_stands_once_whichever_token_the_model_ended_it_with(
    written: str, sampled: str | None, behind: str
) -> None:
    tokenizer = build_character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    tokenizer.chat_template = CHAT.replace("<eos>", written)
    encoder = AnswerEncoder(tokenizer, max_tokens=10, chat_role="tool")
    end = None if sampled is None else int(tokenizer.convert_tokens_to_ids(sampled))
    assert tokenizer.decode(encoder(["42"], end)) == f"{behind}<tool>42{written}\n<assistant>"


def test_the_observation_is_what_was_added_and_not_a_cut_of_rendered_text() -> None:
    """Prompt ids [10, 11], response [5, 3, 6] with a special token that text drops: the answer is still all of it."""
    encoder = AnswerEncoder(TOKENIZER, template="{result}", max_tokens=10)
    assert encoder(["ab"], None) == ids("ab")


def test_a_demonstration_is_answered_by_the_real_tools() -> None:
    agent, _ = parts({"*": "5"})
    assert agent.answer_to("[calculate(2*3)]", end=None) == ids("<6>")
    with pytest.raises(ToolError, match="calls no tool that answers"):
        agent.answer_to("6", end=EOS)


class Echo:
    """Answers every turn until it has seen `stop`."""

    def wants(self, text: str) -> bool:
        return True

    def respond(self, turns: list[Turn]) -> list[Answer]:
        return [Answer(texts=(json.dumps(turn.number),), is_last="stop" in turn.text, score=0.5) for turn in turns]


def test_a_responder_of_ones_own_decides_when_the_episode_ends() -> None:
    agent, engine = parts({"0/1": "a", "0/2": "b", "0/3": "stop"})
    object.__setattr__(agent, "responder", Echo())
    (episode,) = run(agent, engine, [row(0)])
    assert TOKENIZER.decode(episode.ids, skip_special_tokens=True) == "a<1>b<2>stop"
    assert episode.score == 0.5
