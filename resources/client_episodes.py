"""Episodes that a program of the user's plays: it talks to the policy through the OpenAI endpoint, and knows no more.

Each episode runs in a process of its own, with a limit of its own, so an agent that hangs, dies or leaks takes nothing
with it. Several conversations in one episode become several rows of its group.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.problems import ConfigError, Problem
from configs.run import RunConfig
from resources.engines.base import GenerationRequest, Sampling
from resources.environments import with_score
from resources.grader_pool import GraderImportError, GraderPool, PoolFunction, check_functions
from resources.graders import FinishedRow, GraderFailedError
from resources.openai_endpoint import OpenAiEndpoint, Terms
from resources.openai_episodes import EpisodeRows
from resources.rollout_rows import Metrics, RolloutRow, finished_row

Stream = Callable[[Sequence[FinishedRow]], None]
KEYWORDS = ("base_url",)
"""What an agent may ask for beyond what a grader may."""
START_SECONDS = 120.0
SHOWN_CAUSES = 3


class AgentError(RuntimeError):
    """Not one episode of a rollout came to its end; the first causes are told."""


@dataclass(kw_only=True)
class Played:
    """What a rollout's episodes gave."""

    rows: EpisodeRows = field(default_factory=EpisodeRows)
    causes: list[str] = field(default_factory=list)
    """Of episodes that failed; their rows are left out."""
    num_requests: int = 0
    num_episodes: int = 0

    @property
    def metrics(self) -> Metrics:
        """Sums and counts beside those of any rollout."""
        branches = float(len(self.rows.rows))
        return {
            "rollout/calls_mean": float(self.num_requests),
            "rollout/calls_mean/count": float(self.num_episodes),
            "rollout/failed_episodes": float(len(self.causes)),
            "rollout/conversations_mean": branches,
            "rollout/conversations_mean/count": float(self.num_episodes),
        }


class ClientEpisodes:
    """Runs `agent` for each row of a rollout; `close()` ends its processes."""

    def __init__(self, endpoint: OpenAiEndpoint, agent: str, *, processes: int, seconds: float) -> None:
        """`agent`: `module:function`; `seconds`: of one episode. Raises GraderImportError."""
        self.endpoint, self.agent, self._seconds = endpoint, agent, seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agent-episodes", daemon=True)
        self._thread.start()
        self._pool = GraderPool([PoolFunction(target=agent, keywords=KEYWORDS)], processes)
        is_up = False
        try:
            self._wait(self._pool.start(), START_SECONDS)
            is_up = True
        finally:
            if not is_up:
                self.close()

    def run(
        self,
        rows: Sequence[RolloutRow],
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        name: str,
        stream: Stream | None = None,
    ) -> Played:
        """Play an episode for every row; the rows come in row order, those of failed episodes are left out.

        `name`: of this rollout; no two that run at a time may share it. Raises AgentError when every episode failed.
        """
        waves = math.ceil(len(rows) / self._pool.max_processes)
        playing = self._play_all(rows, requests, sampling, name, stream)
        found = self._wait(playing, (waves + 1) * self._seconds + START_SECONDS)
        played = Played()
        for row, (branches_of, cause) in zip(rows, found, strict=True):
            if cause is not None:
                played.causes.append(f"row {row.row_id}: {cause}")
                continue
            played.num_episodes += 1
            played.num_requests += branches_of.pop("requests")
            played.rows.add(row, **branches_of)
        if rows and not played.num_episodes:
            causes = "; ".join(played.causes[:SHOWN_CAUSES])
            raise AgentError(f"all {len(rows)} episodes of {self.agent} failed: {causes}")
        return played

    def close(self) -> None:
        """End the agent's processes and the thread."""
        if not self._thread.is_alive():
            return
        self._wait(self._pool.close(), 30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _wait(self, coroutine: Any, timeout: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    async def _play_all(
        self,
        rows: Sequence[RolloutRow],
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        name: str,
        stream: Stream | None,
    ) -> list[tuple[dict[str, Any], str | None]]:
        started = time.monotonic()

        async def play(row: RolloutRow, request: GenerationRequest) -> tuple[dict[str, Any], str | None]:
            terms = Terms(seed=request.seed, sampling=sampling, max_tokens=request.max_tokens)
            return await self._play(row, terms, f"{name}-{row.row_id}", started, stream)

        played = await asyncio.gather(*(play(row, request) for row, request in zip(rows, requests, strict=True)))
        if not self._pool.is_waited_for:
            self._pool.shrink()
        return played

    async def _play(
        self, row: RolloutRow, terms: Terms, key: str, started: float, stream: Stream | None
    ) -> tuple[dict[str, Any], str | None]:
        """What `EpisodeRows.add` takes, or why the episode failed."""
        self.endpoint.open(key, terms)
        cause: str | None = None
        value: Any = None
        try:
            value, _ = await self._pool.call(0, _arguments(row, self.endpoint.url_of(key)), self._seconds)
        except GraderFailedError as error:
            cause = str(error)
        finally:
            branches = self.endpoint.close_episode(key)
        if cause is None and not branches:
            cause = f"{self.agent} returned without a request that was answered"
        if cause is None and value is not None and not _is_number(value):
            cause = f"{self.agent} returned {value!r:.80}; return a score or nothing"
        if cause is not None:
            return {}, cause
        record = None if value is None else with_score(row.prompt.record(), float(value))
        given = {"branches": branches, "record": record, "seconds": time.monotonic() - started}
        if stream is not None:
            own = EpisodeRows()
            own.add(row, **given)
            together = zip(own.rows, own.sampled(), own.outputs, own.records, strict=True)
            stream([finished_row(r, out, record=rec, length=len(whole.token_ids)) for r, out, whole, rec in together])
        return {**given, "requests": sum(branch.num_calls for branch in branches)}, None


def check_agent(config: RunConfig) -> None:
    """Import the agent before anything is started. Raises ConfigError."""
    agent = config.rollout.servers.agent
    if agent is None:
        return

    try:
        asyncio.run(check_functions([PoolFunction(target=agent, keywords=KEYWORDS)]))
    except GraderImportError as error:
        rule = str(error).replace("graders", "agent", 1)
        way_out = "write module:function of something this Python imports; see code.import_paths"
        raise ConfigError("config", [Problem("rollout.servers.agent", agent, rule, way_out)]) from None


def _arguments(row: RolloutRow, base_url: str) -> Mapping[str, Any]:
    prompt = row.prompt
    return {
        "base_url": base_url,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "source": prompt.source,
        "index": prompt.index,
        "extra": prompt.extra,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
