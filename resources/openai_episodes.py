"""What an agent did over the OpenAI endpoint, as token ids: each conversation is kept as it was sampled.

A client sends text. Where its messages begin with a conversation that was answered here, the ids of that conversation
are taken as they are, and only what came after is encoded; so what is trained is what was sampled. A conversation that
was edited, or forked, begins a branch of its own.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import TemplateError
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from resources.batch import BRANCH_STRIDE
from resources.engines.base import FinishReason, GenerationOutput
from resources.requests_on_the_way import Completion
from resources.rollout_rows import RolloutRow, oldest_versions, shard_of, token_versions_of
from resources.tools.answers import without_end

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


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a request is to be sampled from: a branch's own ids, and what the client wrote behind them."""

    episode: str
    branch: Branch | None
    """None begins a branch."""
    known: int
    """Ids of the branch when the request came."""
    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()

    @property
    def response_length(self) -> int:
        """Tokens behind the branch's prompt, those of the request included."""
        return 0 if self.branch is None else len(self.ids) - self.branch.prompt_length


class EpisodeLog:
    """The branches of every episode, by the episode's key in the address. A request that fails leaves nothing here."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._branches: dict[str, list[Branch]] = {}
        self._lock = threading.Lock()

    def begin(self, episode: str, messages: Sequence[Message], tools: Any = None) -> Opening:
        """Find the branch that `messages` go on from; only what is new is encoded."""
        plain = tuple(_plain(message) for message in messages)
        with self._lock:
            for branch in self._branches.get(episode, []):
                size = len(branch.messages)
                if size and list(plain[:size]) == branch.messages and len(plain) > size:
                    ids = (*branch.ids, *self._encode(self._behind(branch, plain, tools)))
                    return Opening(episode=episode, branch=branch, known=len(branch.ids), ids=ids, messages=plain)
        ids = tuple(self._encode(self._render(plain, tools), is_start=True))
        return Opening(episode=episode, branch=None, known=0, ids=ids, messages=plain)

    def begin_text(self, episode: str, prompt: str | Sequence[int]) -> Opening:
        """A completion: of a text, or of ids, which go on from a branch whose ids they begin with."""
        ids = tuple(self._encode(prompt, is_start=True)) if isinstance(prompt, str) else tuple(prompt)
        with self._lock:
            for branch in self._branches.get(episode, []):
                known = len(branch.ids)
                if len(ids) > known and list(ids[:known]) == branch.ids:
                    return Opening(episode=episode, branch=branch, known=known, ids=ids)
        return Opening(episode=episode, branch=None, known=0, ids=ids)

    def finish(self, opening: Opening, answer: Completion, message: Message | None) -> None:
        """Keep what was sampled, and the message the client will send back.

        Where another request went on from the same ids meanwhile, this one becomes a branch whose prompt they are: no
        token is trained twice.
        """
        with self._lock:
            branch = opening.branch
            if branch is None or len(branch.ids) != opening.known:
                branch = Branch(prompt_length=len(opening.ids))
                branch.append(opening.ids)
                self._branches.setdefault(opening.episode, []).append(branch)
            else:
                branch.append(opening.ids[opening.known :])
            branch.append(answer.token_ids, sampled=answer)
            branch.reason = answer.finish_reason
            branch.num_calls += 1
            branch.messages = [*opening.messages, *(() if message is None else (_plain(message),))]

    def take(self, episode: str) -> list[Branch]:
        """The branches of an episode, which are forgotten here."""
        with self._lock:
            return self._branches.pop(episode, [])

    def _render(self, messages: Sequence[Message], tools: Any) -> str:
        if self._tokenizer.chat_template is None:
            return "".join(str(message.get("content") or "") for message in messages)
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError) as error:  # it is a program, and made for conversations it knows
            raise ValueError(f"the model's chat template takes no such messages or tools: {error}") from error
        return str(text)

    def _behind(self, branch: Branch, messages: Sequence[Message], tools: Any) -> str:
        """What the template writes behind the last answer, which is marked so that its text is not read."""
        mark = "\u2402answer\u2403"
        last = len(branch.messages) - 1
        answered = {"role": "assistant", "content": mark}
        marked = [answered if place == last else message for place, message in enumerate(messages)]
        tail = self._render(marked, tools).partition(mark)[2]
        end = branch.ids[-1]
        has_end = branch.reason is FinishReason.STOP or end == self._tokenizer.eos_token_id
        return without_end(tail, self._tokenizer, end) if has_end else tail

    def _encode(self, text: str, *, is_start: bool = False) -> list[int]:
        """As prompts are encoded: a chat template writes the special tokens itself, a plain start needs the model's."""
        adds = is_start and self._tokenizer.chat_template is None
        return list(self._tokenizer(text, add_special_tokens=adds)["input_ids"])


def _plain(message: Message) -> Message:
    """What a message says; clients add empty fields, and numbers of tool calls mean nothing to a model."""
    kept = {name: message[name] for name in ("role", "content", "name") if message.get(name) is not None}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {**kept, "tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else kept


@dataclass(frozen=True, kw_only=True)
class EpisodeRows:
    """Branches as rows of a batch, each with its output, mask and versions of the tokens after the prompt."""

    rows: list[RolloutRow] = field(default_factory=list)
    outputs: list[GenerationOutput] = field(default_factory=list)
    masks: list[list[bool]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)

    def add(
        self, row: RolloutRow, branches: Sequence[Branch], record: bytes | None = None, seconds: float = 0.0
    ) -> None:
        """Every branch becomes a row of the episode's group. The prompt of a row is what its client sent first."""
        for place, branch in enumerate(branches):
            start, row_id = branch.prompt_length, row.row_id + place * BRANCH_STRIDE
            prompt = replace(row.prompt, ids=tuple(branch.ids[:start]))
            self.rows.append(RolloutRow(row_id=row_id, prompt=prompt, group_size=row.group_size))
            self.outputs.append(
                GenerationOutput(
                    row_id=row_id,
                    token_ids=tuple(branch.ids[start:]),
                    log_probs=tuple(branch.log_probs[start:]),
                    finish_reason=branch.reason,
                    finish_seconds=seconds,
                )
            )
            self.masks.append(branch.mask[start:])
            self.versions.append(branch.versions[start:])
            self.records.append(row.prompt.record() if record is None else record)

    def shard(self) -> TensorDict:
        """The columns of a rollout, `token_versions` among them."""
        shard = shard_of(self.rows, self.outputs, 0, masks=self.masks, row_records=self.records)
        shard["token_versions"] = token_versions_of(self.rows, self.versions)
        shard["policy_versions"] = oldest_versions(self.versions, 0)
        return shard

    def sampled(self) -> list[GenerationOutput]:
        """The policy's own tokens alone: what graders read and metrics count."""
        return [
            replace(
                output,
                token_ids=tuple(token for token, own in zip(output.token_ids, mask, strict=True) if own),
                log_probs=tuple(value for value, own in zip(output.log_probs, mask, strict=True) if own),
            )
            for output, mask in zip(self.outputs, self.masks, strict=True)
        ]
