"""What an agent did over the OpenAI endpoint, as token ids: each conversation is kept as it was sampled.

A client sends text. Where its messages begin with a conversation that was answered here, the ids of that conversation
are taken as they are, and only what came after is encoded; so what is trained is what was sampled. A conversation that
was edited, or forked, begins a branch of its own.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from resources.engines.base import FinishReason, GenerationOutput
from resources.rollout_rows import RolloutRow, shard_of, token_versions_of
from resources.rollout_servers import Completion

Message = dict[str, Any]


@dataclass(slots=True)
class Branch:
    """One conversation that only grew."""

    messages: list[Message] = field(default_factory=list)
    """With the assistant's answers, as they were given to the client."""
    prompt_length: int = 0
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP
    num_calls: int = 0

    def append(self, ids: Sequence[int], *, sampled: Completion | None = None) -> None:
        """What the client sent, or what was sampled."""
        self.ids += ids
        self.mask += [sampled is not None] * len(ids)
        self.log_probs += [0.0] * len(ids) if sampled is None else sampled.log_probs
        self.versions += [-1] * len(ids) if sampled is None else sampled.versions


class EpisodeLog:
    """The branches of every episode, by the episode's key in the address."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._branches: dict[str, list[Branch]] = {}
        self._lock = threading.Lock()

    def begin(self, episode: str, messages: Sequence[Message], tools: Any = None) -> tuple[Branch, list[int]]:
        """The branch that `messages` go on from, and the prompt's ids: the branch's own, then what is new."""
        plain = [_plain(message) for message in messages]
        with self._lock:
            branches = self._branches.setdefault(episode, [])
            for branch in branches:
                size = len(branch.messages)
                if size and plain[:size] == branch.messages and len(plain) > size:
                    branch.append(self._encode(self._behind(branch, plain, tools)))
                    branch.messages = plain
                    return branch, list(branch.ids)
            branch = Branch(messages=plain)
            branch.append(self._encode(self._render(plain, tools)))
            branch.prompt_length = len(branch.ids)
            branches.append(branch)
            return branch, list(branch.ids)

    def begin_text(self, episode: str, prompt: Sequence[int]) -> Branch:
        """A completion of a prompt in ids: it goes on from a branch whose ids it begins with."""
        with self._lock:
            branches = self._branches.setdefault(episode, [])
            for branch in branches:
                if len(prompt) > len(branch.ids) and list(prompt[: len(branch.ids)]) == branch.ids:
                    branch.append(prompt[len(branch.ids) :])
                    return branch
            branch = Branch()
            branch.append(prompt)
            branch.prompt_length = len(prompt)
            branches.append(branch)
            return branch

    def finish(self, branch: Branch, answer: Completion, message: Message | None) -> None:
        """Keep what was sampled, and the message the client will send back."""
        with self._lock:
            branch.append(answer.token_ids, sampled=answer)
            branch.reason = answer.finish_reason
            branch.num_calls += 1
            if message is not None:
                branch.messages.append(_plain(message))

    def take(self, episode: str) -> list[Branch]:
        """The branches of an episode, which are forgotten here."""
        with self._lock:
            return self._branches.pop(episode, [])

    def _render(self, messages: Sequence[Message], tools: Any) -> str:
        if self._tokenizer.chat_template is None:
            return "".join(str(message.get("content") or "") for message in messages)
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    def _behind(self, branch: Branch, messages: Sequence[Message], tools: Any) -> str:
        """What the template writes behind the last answer, which is marked so that its text is not read."""
        mark = "\u2402answer\u2403"
        last = len(branch.messages) - 1
        answered = {"role": "assistant", "content": mark}
        marked = [answered if place == last else message for place, message in enumerate(messages)]
        tail = self._render(marked, tools).partition(mark)[2]
        end = str(self._tokenizer.eos_token)
        return tail.removeprefix(end) if branch.ids[-1] == self._tokenizer.eos_token_id else tail

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain(message: Message) -> Message:
    """What a message says; clients add empty fields, and numbers of tool calls mean nothing to a model."""
    kept = {name: message[name] for name in ("role", "content", "name") if message.get(name) is not None}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {**kept, "tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else kept


def rows_of_episode(
    row: RolloutRow, branches: Sequence[Branch], first_row_id: int
) -> tuple[list[RolloutRow], TensorDict]:
    """Every branch as a row of the batch; siblings share the group. The prompt of a row is what its client sent first.

    `token_versions` is among the columns.
    """
    rows: list[RolloutRow] = []
    outputs: list[GenerationOutput] = []
    for branch, row_id in zip(branches, itertools.count(first_row_id), strict=False):
        prompt = replace(row.prompt, ids=tuple(branch.ids[: branch.prompt_length]))
        rows.append(RolloutRow(row_id=row_id, prompt=prompt, group_size=row.group_size))
        outputs.append(
            GenerationOutput(
                row_id=row_id,
                token_ids=tuple(branch.ids[branch.prompt_length :]),
                log_probs=tuple(branch.log_probs[branch.prompt_length :]),
                finish_reason=branch.reason,
            )
        )
    masks = [branch.mask[branch.prompt_length :] for branch in branches]
    versions = [branch.versions[branch.prompt_length :] for branch in branches]
    oldest = min((version for own in versions for version in own if version >= 0), default=0)
    shard = shard_of(rows, outputs, oldest, masks=masks)
    shard["token_versions"] = token_versions_of(rows, versions)
    return rows, shard
