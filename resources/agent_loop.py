"""Episodes of several turns on token ids: sample, let tools or an environment answer, go on with the same ids.

Nothing that was sampled is ever decoded and encoded again: text is made to find tool calls, and only the answer's own
text is encoded. The ids of the next turn are the old ids and the answer's, which are not trained (their mask is False).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from resources.engines.base import Engine, FinishReason, GenerationOutput, GenerationRequest, Sampling
from resources.seeding import stream_seed


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the policy wrote in one turn."""

    row_id: int
    group_id: int
    number: int
    text: str
    record: bytes
    """Of the prompt, as graders get it."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What comes back."""

    texts: tuple[str, ...] = ()
    """Results to read before the next turn; none ends the episode."""
    is_last: bool = True
    score: float | None = None
    """An environment's reward of the whole episode so far."""
    has_failed: bool = False
    """The environment is broken: what it said before is no score of this episode."""
    num_calls: int = 0
    num_errors: int = 0


class Responder(Protocol):
    """Answers turns: tools, or an environment."""

    def wants(self, text: str) -> bool:
        """Whether a turn that reads like this is to be answered; an episode ends with one that is not."""
        ...

    def respond(self, turns: Sequence[Turn]) -> list[Answer]:
        """One answer a turn, in order. Called from a thread of its own; it may block."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """How turns are read and answers written, and what an episode may use up."""

    decode: Callable[[Sequence[int]], str]
    encode_answer: Callable[[Sequence[str], int | None], list[int]]
    """(texts of results, the token that ended the turn for good, if one did) -> ids to append."""
    end_ids: frozenset[int]
    """Tokens that end a turn for good; other stop tokens (the end of a tool call) only pause it."""
    max_turns: int
    max_tokens: int
    """Of the whole response, answers included."""
    answer_seconds: float = 600.0
    """Longest wait for any answer at all; tools and environments have limits of their own below it."""


@dataclass(slots=True)
class Episode:
    """One response in the making."""

    request: GenerationRequest
    group_id: int
    record: bytes
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turn_start: int = 0
    """Where in `ids` the present turn began."""
    num_turns: int = 1
    num_requests: int = 0
    num_calls: int = 0
    num_errors: int = 0
    score: float | None = None
    reason: FinishReason | None = None
    finish_seconds: float = 0.0

    @property
    def row_id(self) -> int:
        """Of the batch."""
        return self.request.row_id

    def next_request(self, max_tokens: int) -> GenerationRequest:
        """Go on from the ids so far; the noise of each request is its own."""
        seed = self.request.seed if not self.num_requests else stream_seed(self.request.seed, "turn", self.num_requests)
        self.num_requests += 1
        return GenerationRequest(
            row_id=self.row_id,
            prompt_ids=(*self.request.prompt_ids, *self.ids),
            seed=seed,
            max_tokens=max_tokens,
            answer=self.request.answer,
            prompt_index=self.request.prompt_index,
        )

    def take(self, output: GenerationOutput) -> None:
        """Append what was sampled."""
        self._append(output.token_ids, True, output.log_probs)

    def read(self, ids: Sequence[int]) -> None:
        """Append what was answered."""
        self._append(ids, False, [0.0] * len(ids))
        self.turn_start = len(self.ids)
        self.num_turns += 1

    def lose(self) -> None:
        """Nobody answered a turn: as with a response of one turn, no token is left that could be graded or trained."""
        self.ids, self.mask, self.log_probs = [], [], []
        self.turn_start, self.score, self.reason = 0, None, FinishReason.ABORT

    def _append(self, ids: Sequence[int], is_sampled: bool, log_probs: Sequence[float]) -> None:
        self.ids += ids
        self.mask += [is_sampled] * len(ids)
        self.log_probs += log_probs

    def sampled(self) -> GenerationOutput:
        """The policy's own tokens alone: what graders read and metrics count."""
        return GenerationOutput(
            row_id=self.row_id,
            token_ids=tuple(token for token, own in zip(self.ids, self.mask, strict=True) if own),
            log_probs=tuple(value for value, own in zip(self.log_probs, self.mask, strict=True) if own),
            finish_reason=FinishReason.ABORT if self.reason is None else self.reason,
            finish_seconds=self.finish_seconds,
        )


OnEpisodes = Callable[[list[Episode]], None]


class AgentLoop:
    """Runs episodes on one engine: while some wait for their tools, the others decode."""

    def __init__(self, engine: Engine, dialogue: Dialogue, responder: Responder) -> None:
        self.engine, self.dialogue, self.responder = engine, dialogue, responder

    def run(self, episodes: Sequence[Episode], sampling: Sampling, on_finished: OnEpisodes | None = None) -> None:
        """Bring every episode to its end; `on_finished` gets them as they end. On an error nothing is left behind."""
        by_id = {episode.row_id: episode for episode in episodes}
        answering: dict[Future[list[Answer]], list[Episode]] = {}
        started, is_done = time.monotonic(), False
        pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="answers")
        try:
            for episode in episodes:
                self._sample(episode, sampling)
            while self.engine.has_unfinished() or answering:
                outputs = self.engine.step() if self.engine.has_unfinished() else []
                took = [by_id[output.row_id] for output in outputs]
                asking = [e for e, output in zip(took, outputs, strict=True) if self._take(e, output, sampling)]
                if asking:
                    turns = [self._turn(episode) for episode in asking]
                    answering[pool.submit(self.responder.respond, turns)] = asking
                ended = [episode for episode in took if episode.reason is not None]
                ended += self._hear(answering, sampling, blocking=not self.engine.has_unfinished())
                for episode in ended:
                    episode.finish_seconds = time.monotonic() - started
                if ended and on_finished is not None:
                    on_finished(ended)
            is_done = True
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if not is_done:
                self.engine.abort()

    def _sample(self, episode: Episode, sampling: Sampling) -> None:
        self.engine.add_request(episode.next_request(self.dialogue.max_tokens - len(episode.ids)), sampling)

    def _take(self, episode: Episode, output: GenerationOutput, sampling: Sampling) -> bool:
        """Take what was sampled; whether the turn wants an answer. Where it does not, the episode ends, or goes on."""
        episode.take(output)
        if output.finish_reason is FinishReason.ABORT and not output.token_ids:
            episode.lose()
            return False
        if output.finish_reason is not FinishReason.STOP:
            episode.reason = output.finish_reason
            return False
        if self.responder.wants(self._text(episode)):
            return True
        if episode.ids[-1] in self.dialogue.end_ids:
            episode.reason = FinishReason.STOP
        elif len(episode.ids) >= self.dialogue.max_tokens:
            episode.reason = FinishReason.LENGTH
        else:  # what looked like the end of a call is none: the turn goes on
            self._sample(episode, sampling)
        return False

    def _text(self, episode: Episode) -> str:
        return self.dialogue.decode(episode.ids[episode.turn_start :])

    def _turn(self, episode: Episode) -> Turn:
        return Turn(
            row_id=episode.row_id,
            group_id=episode.group_id,
            number=episode.num_turns,
            text=self._text(episode),
            record=episode.record,
        )

    def _hear(
        self, answering: dict[Future[list[Answer]], list[Episode]], sampling: Sampling, *, blocking: bool
    ) -> list[Episode]:
        """Go on with the episodes whose answers came; gives those that ended."""
        if not answering:
            return []
        seconds = self.dialogue.answer_seconds if blocking else 0.0
        done, _ = wait(answering, timeout=seconds, return_when=FIRST_COMPLETED)
        if blocking and not done:
            late = sorted(episode.row_id for group in answering.values() for episode in group)
            raise TimeoutError(f"no answer to the turns of rows {late[:8]} within {seconds:g} s; see rollout.tools")
        ended: list[Episode] = []
        for future in done:
            for episode, answer in zip(answering.pop(future), future.result(), strict=True):
                self._read(episode, answer)
                if episode.reason is None:
                    self._sample(episode, sampling)
                else:
                    ended.append(episode)
        return ended

    def _read(self, episode: Episode, answer: Answer) -> None:
        """Append the answer, or end the episode: nothing to read, no turn left, or no room for one more token."""
        episode.num_calls += answer.num_calls
        episode.num_errors += answer.num_errors
        if answer.score is not None or answer.has_failed:
            episode.score = answer.score
        if answer.is_last:
            episode.reason = FinishReason.STOP
            return
        last = episode.ids[-1]
        ids = self.dialogue.encode_answer(answer.texts, last if last in self.dialogue.end_ids else None)
        room = self.dialogue.max_tokens - len(episode.ids) - len(ids)
        if episode.num_turns >= self.dialogue.max_turns or room < 1:
            episode.reason = FinishReason.LENGTH
            return
        episode.read(ids)
