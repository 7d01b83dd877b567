"""Episodes as rows of a rollout: what the rollout worker does where there are tools or an environment."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from configs.data import DataConfig
from configs.rollout import RolloutConfig, ToolsConfig
from resources.agent_loop import AgentLoop, Dialogue, Episode, Responder, Turn
from resources.engines.base import Engine, GenerationOutput, GenerationRequest, Sampling
from resources.environments import EnvironmentResponder, with_score
from resources.graders import FinishedRow
from resources.rollout_rows import Metrics, RolloutRow, finished_row, shard_of
from resources.tools.answers import AnswerEncoder
from resources.tools.calls import CLOSING
from resources.tools.responder import ToolResponder
from resources.tools.schema import ToolError, load_tools

Stream = Callable[[Sequence[FinishedRow]], None]
GRACE_SECONDS = 60.0
"""To diagnose a call that missed its deadline."""


@dataclass(frozen=True, kw_only=True)
class AgentRollout:
    """Made once in each rollout worker; see `build_agent_rollout`."""

    tools: ToolsConfig
    dialogue: Dialogue
    stop_ids: tuple[int, ...]
    """Ends of a turn, and the token that ends a tool call where one token does."""
    responder: ToolResponder | None

    def run(
        self,
        engine: Engine,
        rows: Sequence[RolloutRow],
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        environment: Any = None,
        stream: Stream | None = None,
    ) -> list[Episode]:
        """Run an episode for every row, in row order.

        `environment`: handle of the env role's worker group, where the config has one.
        """
        episodes = [
            Episode(request=request, group_id=row.group_id, record=row.prompt.record())
            for row, request in zip(rows, requests, strict=True)
        ]
        by_id = {row.row_id: row for row in rows}

        def hand_on(ended: list[Episode]) -> None:
            if stream is not None:
                stream([_finished(by_id[episode.row_id], episode, self.has_environment) for episode in ended])

        AgentLoop(engine, self._dialogue(environment), self._responder(environment)).run(
            episodes, _stopping(sampling, self.stop_ids), hand_on
        )
        return episodes

    @property
    def has_environment(self) -> bool:
        """Whether scores come from an environment."""
        return self.tools.environment is not None

    def _responder(self, environment: Any) -> Responder:
        if self.responder is not None:
            return self.responder
        if environment is None:
            raise ValueError(
                f"rollout.tools.environment is {self.tools.environment!r} and no group of the env role was handed over"
            )
        return EnvironmentResponder(environment)

    def _dialogue(self, environment: Any) -> Dialogue:
        """Environments answer within the deadline of a call of their group, which says what is late."""
        if self.responder is not None or environment is None:
            return self.dialogue
        return replace(self.dialogue, answer_seconds=environment.call_seconds + GRACE_SECONDS)

    def pauses_at(self, token: int) -> bool:
        """Whether sampling stops at this token without the turn being over for good."""
        return token in self.stop_ids and token not in self.dialogue.end_ids

    def answer_to(self, text: str, *, end: int | None) -> list[int]:
        """Ids of what the tools say to a turn, for demonstrations. `end`: the token behind it that ends it, if any.

        Raises ToolError where they say nothing.
        """
        if self.responder is None:
            raise ToolError("demonstrations of several turns need rollout.tools.functions; environments show no way")
        turn = Turn(row_id=0, group_id=0, number=1, text=text, record=b"{}")
        answer = self.responder.respond([turn])[0]
        if answer.is_last or answer.num_errors:
            raise ToolError(f"the demonstration's turn {text!r} calls no tool that answers: {list(answer.texts)}")
        return self.dialogue.encode_answer(answer.texts, end)

    def shard(self, rows: Sequence[RolloutRow], episodes: Sequence[Episode], policy_version: int) -> TensorDict:
        """The columns of a rollout; tokens of answers are in `input_ids` and not in `response_mask`."""
        whole = [
            GenerationOutput(
                row_id=episode.row_id,
                token_ids=tuple(episode.ids),
                log_probs=tuple(episode.log_probs),
                finish_reason=episode.sampled().finish_reason,
            )
            for episode in episodes
        ]
        records = [_record(episode, self.has_environment) for episode in episodes]
        masks = [episode.mask for episode in episodes]
        return shard_of(rows, whole, policy_version, masks=masks, row_records=records)


def build_agent_rollout(
    rollout: RolloutConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
) -> AgentRollout | None:
    """None where the config has neither tools nor environment. Raises ToolError for a tool that cannot be offered."""
    tools = rollout.tools
    if tools is None:
        return None
    ends = frozenset({*end_ids, *rollout.sampling.stop_token_ids})
    closing = _one_token(tokenizer, CLOSING[tools.notation]) if tools.functions else None
    role = ("tool" if tools.functions else "user") if data.chat_template else None
    dialogue = Dialogue(
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        encode_answer=AnswerEncoder(
            tokenizer, template=tools.result_template, max_tokens=tools.max_tool_tokens, chat_role=role
        ),
        end_ids=ends,
        max_turns=tools.max_turns,
        max_tokens=rollout.max_response_length,
        answer_seconds=4 * tools.timeout_seconds,
    )
    return AgentRollout(
        tools=tools,
        dialogue=dialogue,
        stop_ids=tuple(sorted({*ends, *(() if closing is None else (closing,))})),
        responder=ToolResponder(load_tools(tools.functions), tools.notation, tools.timeout_seconds)
        if tools.functions
        else None,
    )


def tool_schemas(rollout: RolloutConfig) -> list[dict[str, Any]]:
    """What a chat template tells the model of its tools; empty without any."""
    if rollout.tools is None:
        return []
    return [tool.schema() for tool in load_tools(rollout.tools.functions).values()]


def episode_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Sums and counts beside those of any rollout."""
    count = float(len(episodes))
    sums = {
        "rollout/turns_mean": float(sum(episode.num_turns for episode in episodes)),
        "rollout/calls_mean": float(sum(episode.num_calls for episode in episodes)),
        "rollout/call_errors_mean": float(sum(episode.num_errors for episode in episodes)),
        "rollout/read_tokens_mean": float(sum(episode.mask.count(False) for episode in episodes)),
    }
    return {**sums, **{f"{name}/count": count for name in sums}}


def _stopping(sampling: Sampling, stop_ids: tuple[int, ...]) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=stop_ids,
        greedy=sampling.greedy,
    )


def _one_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The id that is written for `text`; None where it takes several, and then a turn ends with end-of-sequence."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(ids[0]) if len(ids) == 1 else None


def _record(episode: Episode, has_environment: bool) -> bytes:
    return with_score(episode.record, episode.score) if has_environment else episode.record


def _finished(row: RolloutRow, episode: Episode, has_environment: bool) -> FinishedRow:
    record = _record(episode, has_environment)
    return finished_row(row, episode.sampled(), record=record, length=len(episode.ids))
