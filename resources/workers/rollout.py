"""The rollout worker: reads its prompts, samples responses with its engine, and takes new weights.

Every rank reads the same slice of prompts and keeps the groups that are its engine's: `group_id % num_engines`. So row
-> engine is a function of the row, and no prompt passes through the driver.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from configs.data import DataConfig, ValidationConfig
from configs.model import ModelConfig
from configs.rollout import RolloutConfig, SamplingConfig
from resources.agent_rollout import AgentRollout, build_agent_rollout, episode_metrics, tool_schemas
from resources.client_episodes import ClientEpisodes
from resources.dispatch import Dispatch, dispatch
from resources.engines.base import Engine, GenerationOutput, GenerationRequest, Sampling, build_engine
from resources.graders import FinishedRow
from resources.models.causal_lm import load_model_config, load_tokenizer, prepare_model_folder
from resources.models.generation_config import end_token_ids
from resources.prompts import Prompt, PromptError, PromptSource
from resources.request_serving import ServesRequests
from resources.requests_on_the_way import RequestLostError
from resources.rollout_rows import (
    Metrics,
    RolloutRow,
    facts_of,
    finished_row,
    greedy_rows,
    oldest_versions,
    requests_of,
    rollout_metrics,
    rows_of,
    shard_of,
    token_versions_of,
)
from resources.seeding import stream_seed
from resources.served_engine import ServedEngine
from resources.telemetry.rollout_gauge import response_length_facts
from resources.weight_receiver import ReceivesWeights

Status = dict[str, Any]
Stream = Callable[[Sequence[FinishedRow]], None]
"""Gets rows as they finish, between two decode steps; it must hand them on and return."""


class RolloutWorker(ReceivesWeights, ServesRequests):
    """One rank of the rollout role: an engine, or a tensor-parallel part of one."""

    role = "rollout"

    def __init__(
        self,
        rollout: RolloutConfig,
        model: ModelConfig,
        data: DataConfig,
        seed: int,
        *,
        validation: ValidationConfig | None = None,
        threads: int | None = None,
        tensor_parallel: int = 1,
        replica: int = 0,
        engine: Engine | None = None,
        clients: ClientEpisodes | None = None,
    ) -> None:
        """Read the prompts and start the engine on the model's own weights (policy version 0).

        `replica`: number of this engine among replicas that are worker groups of their own. `engine`: in place of one
        made here, for a worker that only reads prompts and makes rows. `clients`: plays the episodes, where a program
        of the user's does.

        Raises PromptError, ModelError, or ValueError for ranks that `tensor_parallel` does not divide.
        """
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world_size % tensor_parallel:
            raise ValueError(
                f"{world_size} rollout ranks do not divide into engines of tensor_parallel = {tensor_parallel}"
            )
        if threads is not None:
            torch._C.set_num_threads(threads)  # an engine may have replaced torch.set_num_threads
        self.rank_offset = replica * tensor_parallel
        self.rank, self.engine_index, self.num_engines = rank, rank // tensor_parallel, world_size // tensor_parallel
        self.rollout, self.data, self.validation = rollout, data, validation
        self.siblings: dict[str, Any] = {}
        self.clients = clients
        self.run_seed = seed + rollout.seed_offset
        self.tokenizer = load_tokenizer(model)
        tools = tool_schemas(rollout)
        self.prompts = PromptSource(data, self.tokenizer, tools=tools)
        self.held_out = None
        if validation is not None and validation.sources:
            self.held_out = PromptSource.for_validation(validation, data, self.tokenizer, tools)
        self.stride = _largest_group(rollout.group_size, self.prompts)
        folder = prepare_model_folder(model, seed)
        model_config = load_model_config(model)
        self.eos_token_ids = end_token_ids(str(folder), model_config, self.tokenizer)
        self.agent = build_agent_rollout(rollout, data, self.tokenizer, self.eos_token_ids)
        self.engine = engine or build_engine(
            rollout,
            str(folder),
            dtype=rollout.dtype or model.dtype,
            vocab_size=int(model_config.get_text_config().vocab_size),
            max_model_length=rollout.max_model_length or data.max_prompt_length + rollout.max_response_length,
            seed=stream_seed(seed, "engine", self.engine_index + replica),
            tensor_parallel=tensor_parallel,
        )

    @dispatch(Dispatch.MESH, bulk=True, split=())
    def sample(
        self,
        epoch: int,
        start: int,
        count: int,
        group_size: int,
        iteration: int,
        policy_version: int | None = None,
        skip: Collection[str] = (),
        stream: Stream | None = None,
        greedy: bool = False,
        environment: Any = None,
    ) -> tuple[Status, TensorDict]:
        """Sample responses to the `count` prompts from position (epoch, start) on.

        Args:
            epoch: pass over the data.
            start: position in it.
            count: prompts, over all engines.
            group_size: responses per prompt, where the source asks for no other number.
            iteration: enters the seeds, so that a prompt seen again gets other noise.
            policy_version: the version the engine must hold; any when None.
            skip: prompt keys to leave out (curriculum).
            stream: gets finished rows while others still decode.
            greedy: one greedy response a prompt instead (a baseline; row ids are negative).
            environment: the env role's worker group, where the config has an environment.

        Returns:
            status (metrics, facts per row, `next_position`, this engine's `num_prompts`, spans) and its rows.

        Raises:
            RuntimeError: when the engine holds another policy version.
        """
        may_be_newer = self.rollout.servers.updates_while_sampling
        held = self.engine.policy_version
        if policy_version is not None and held != policy_version and not (may_be_newer and held > policy_version):
            raise RuntimeError(
                f"engine {self.engine_index} holds policy version {self.engine.policy_version}; version "
                f"{policy_version} was "
                "asked for. Sync the weights before the rollout"
            )
        wanted = self.prompts.rows(epoch, start, count, skip=set(skip))
        mine = self._mine(wanted.prompts)
        rows = greedy_rows(mine) if greedy else rows_of(mine, group_size, self.stride)
        sampling = Sampling.from_config(self.rollout.sampling, self.eos_token_ids, greedy=greedy)
        with self._awake():
            status, shard = self._generate(rows, sampling, self.run_seed, iteration, stream, environment)
        position = {"epoch": wanted.epoch, "start": wanted.start, "identity": self.prompts.identity}
        return {**status, "next_position": position, "num_prompts": len(mine)}, shard

    @dispatch(Dispatch.MESH, bulk=True, split=())
    def evaluate(
        self,
        count: int,
        samples_per_prompt: int = 1,
        greedy: bool = False,
        stream: Stream | None = None,
        environment: Any = None,
    ) -> tuple[Status, TensorDict]:
        """Sample held-out prompts: the first `count`, always the same and with the same seeds, so runs compare.

        Row ids are those of the validation prompts' own order; they don't mix with training rows.
        """
        if self.held_out is None or self.validation is None:
            raise PromptError("there are no validation prompts; give validation.sources")
        if count > self.held_out.num_rows:
            raise PromptError(
                f"validation.num_prompts is {count} but only {self.held_out.num_rows} prompts are there; lower it"
            )
        mine = self._mine(self.held_out.rows(0, 0, count).prompts)
        size = 1 if greedy else samples_per_prompt
        rows = [
            RolloutRow(row_id=prompt.ordinal * size + k, prompt=prompt, group_size=size)
            for prompt in mine
            for k in range(size)
        ]
        config = self.rollout.sampling
        tempered = SamplingConfig(temperature=self.validation.temperature, stop_token_ids=config.stop_token_ids)
        sampling = Sampling.from_config(tempered, self.eos_token_ids, greedy=greedy)
        seed = stream_seed(self.run_seed, "validation")
        with self._awake():
            return self._generate(rows, sampling, seed, 0, stream, environment)

    @dispatch(Dispatch.BROADCAST)
    def describe_prompts(self) -> dict[str, Any]:
        """Rows of an epoch, how many were filtered out, and the identity a checkpoint keeps."""
        return {
            "num_rows": self.prompts.num_rows,
            "num_filtered": self.prompts.num_filtered,
            "identity": self.prompts.identity,
        }

    @dispatch(Dispatch.BROADCAST)
    def resume_position(self, state: dict[str, Any]) -> Status:
        """The position to go on from, given what a checkpoint kept; the beginning if the data is other data."""
        return self.prompts.position_state(*self.prompts.resume_position(state))

    @dispatch(Dispatch.BROADCAST)
    def sleep(self) -> None:
        """Free the accelerator for another role of this bundle; with `rollout.offload` each rollout ends so."""
        self._rest_engine()

    @dispatch(Dispatch.BROADCAST)
    def wake(self) -> None:
        """Undo `sleep`; what samples and what brings new weights does so by itself."""
        self._wake_engine()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._wake_engine()
        try:
            yield
        finally:
            if self.rollout.offload:
                self._rest_engine()

    def _mine(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if prompt.ordinal % self.num_engines == self.engine_index]

    def _generate(
        self,
        rows: list[RolloutRow],
        sampling: Sampling,
        run_seed: int,
        iteration: int,
        stream: Stream | None,
        environment: Any,
    ) -> tuple[Status, TensorDict]:
        started = time.monotonic()
        requests = requests_of(rows, run_seed, iteration, self.rollout.max_response_length)
        if self.clients is not None:
            played = self.clients.run(rows, requests, sampling, f"{run_seed:x}-{iteration}", stream)
            facts = _facts_of(played.rows.sampled(), time.monotonic() - started)
            return (
                self._status(played.rows.rows, played.rows.sampled(), started, played.metrics, facts),
                played.rows.shard(),
            )
        if self.agent is not None:
            return self._episodes(self.agent, rows, requests, sampling, started, environment, stream)
        by_id = {row.row_id: row for row in rows}

        def hand_on(outputs: list[GenerationOutput]) -> None:
            if stream is not None:
                stream([finished_row(by_id[output.row_id], output) for output in outputs])

        outputs = self.engine.generate(requests, sampling, None if stream is None else hand_on)
        if isinstance(self.engine, ServedEngine):
            return self._served(self.engine, rows, outputs, started)
        shard = shard_of(rows, outputs, self.engine.policy_version)
        return self._status(rows, outputs, started, {}, self.engine.facts.span), shard

    def _episodes(
        self,
        agent: AgentRollout,
        rows: list[RolloutRow],
        requests: list[GenerationRequest],
        sampling: Sampling,
        started: float,
        environment: Any,
        stream: Stream | None,
    ) -> tuple[Status, TensorDict]:
        episodes = agent.run(self.engine, rows, requests, sampling, environment, stream)
        counted: Metrics = {}
        versions: list[list[int]] | None = None
        if isinstance(self.engine, ServedEngine):
            counted = _lost(self.engine, rows)
            versions = [_spread(self.engine.versions_of(episode.row_id), episode.mask) for episode in episodes]
            self.engine.forget()
        shard = agent.shard(rows, episodes, self.engine.policy_version)
        if versions is not None:
            _note_versions(shard, rows, versions, self.engine.policy_version)
        outputs = [episode.sampled() for episode in episodes]
        facts = _facts_of(outputs, time.monotonic() - started)
        return self._status(rows, outputs, started, {**episode_metrics(episodes), **counted}, facts), shard

    def _served(
        self, engine: ServedEngine, rows: list[RolloutRow], outputs: list[GenerationOutput], started: float
    ) -> tuple[Status, TensorDict]:
        """Every token with its version. A row that no replica could answer ends with ABORT and has no token."""
        counted = _lost(engine, rows)
        versions = [engine.versions_of(row.row_id) for row in rows]
        engine.forget()
        shard = shard_of(rows, outputs, engine.policy_version)
        _note_versions(shard, rows, versions, engine.policy_version)
        counted |= _updates_met(versions)
        return self._status(rows, outputs, started, counted, engine.facts.span), shard

    def _status(
        self,
        rows: list[RolloutRow],
        outputs: list[GenerationOutput],
        started: float,
        metrics: Metrics,
        facts: dict[str, Any],
    ) -> Status:
        return {
            "metrics": {**rollout_metrics(rows, outputs), **metrics},
            "rows": facts_of(rows, outputs),
            "policy_version": self.engine.policy_version,
            "spans": {
                "rank": self.rank,
                "start": started,
                "end": time.monotonic(),
                "rows": len(rows),
                **facts,
                **self.weights_facts(started),
                "policy_version": self.engine.policy_version,
            },
        }


def _facts_of(outputs: list[GenerationOutput], seconds: float) -> dict[str, Any]:
    lengths = [len(output.token_ids) for output in outputs]
    rate = sum(lengths) / max(seconds, 1e-9)
    return {**response_length_facts(lengths), "tokens": sum(lengths), "tokens_per_second": rate}


def _lost(engine: ServedEngine, rows: Sequence[RolloutRow]) -> Metrics:
    """How many rows no replica answered, and how many went to another one. Raises RequestLostError for all of them."""
    if rows and len(engine.lost) == len(rows):
        causes = next(iter(engine.lost.values()))
        raise RequestLostError(f"no replica answered any of {len(rows)} rows: {causes}")
    counts = {"rollout/lost_rows": len(engine.lost), "rollout/redispatches": engine.new_redispatches()}
    return {name: float(value) for name, value in counts.items()}


def _note_versions(
    shard: TensorDict, rows: Sequence[RolloutRow], versions: Sequence[Sequence[int]], default: int
) -> None:
    shard["token_versions"] = token_versions_of(rows, versions)
    shard["policy_versions"] = oldest_versions(versions, default)


def _spread(versions: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """Versions of the sampled tokens at their places among those that were read, which have -1."""
    sampled = iter(versions)
    return [next(sampled) if own else -1 for own in mask]


def _updates_met(versions: list[list[int]]) -> Metrics:
    """Share of responses whose tokens were sampled by more than one version of the policy."""
    mixed = sum(len({version for version in own if version >= 0}) > 1 for own in versions)
    return {"rollout/updated_fraction": float(mixed), "rollout/updated_fraction/count": float(len(versions))}


def _largest_group(group_size: int, prompts: PromptSource) -> int:
    return max([group_size, *(size for size in prompts.group_sizes if size is not None)])
