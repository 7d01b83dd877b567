"""A tiny model, a small ragged batch and real objectives, for the tests of workers."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from configs.model import ModelConfig, ModelShape, OptimizerConfig
from configs.training import CriticConfig, TrainedRoleConfig
from resources.batch import join_columns, make_shard, ragged_from_rows, ragged_from_values, row_lengths
from resources.update_plan import UpdatePlan, make_update_plans
from resources.workers.actor import ActorWorker
from resources.workers.critic import CriticWorker
from tasks.algorithms.diagnostics import finish_metrics
from tasks.algorithms.objectives import actor_objective, critic_objective
from tasks.replies import add_sums

SHAPE = ModelShape(
    num_layers=2, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, vocab_size=100, max_positions=64
)
MODEL = ModelConfig(build="tiny", shape=SHAPE)
OPTIMIZER = OptimizerConfig(lr=1e-2)
PPO = functools.partial(
    actor_objective, policy_loss="ppo", aggregation="token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2
)
VALUE_LOSS = functools.partial(critic_objective, value_clip=0.2)
TEMPERATURE = 0.7


def actor(model: ModelConfig = MODEL, **settings: Any) -> ActorWorker:
    """An actor of rank RANK."""
    options = {name: settings.pop(name) for name in ("tensor_parallel", "sequence_parallel") if name in settings}
    role = TrainedRoleConfig(**{"optimizer": OPTIMIZER, "micro_batch_size": 3, "log_prob_chunk_tokens": 7, **settings})
    return ActorWorker(model, role, 0, threads=1, **options)


def critic(model: ModelConfig = MODEL, **settings: Any) -> CriticWorker:
    """A critic of rank RANK."""
    return CriticWorker(
        model, CriticConfig(**{"optimizer": OPTIMIZER, "micro_batch_size": 3, **settings}), 0, threads=1
    )


def logged(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What a run logs of the metrics that its ranks give."""
    return finish_metrics(add_sums(ranks))


def make_rows(count: int = 7, seed: int = 0) -> TensorDict:
    """Prompts of 1 to 3 tokens, responses of 1 to 9; row ids 100, 101, ...; random advantages and returns."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 4, (count,), generator=generator)
    responses = torch.randint(1, 10, (count,), generator=generator)
    lengths = prompts + responses
    total = int(lengths.sum())
    place = torch.cat([torch.arange(int(length)) for length in lengths])
    mask = place >= prompts.repeat_interleave(lengths)
    return make_shard(
        {
            "row_ids": torch.arange(100, 100 + count),
            "group_ids": torch.arange(count) // 2,
            "input_ids": ragged_from_values(torch.randint(4, 100, (total,), generator=generator), lengths),
            "response_mask": ragged_from_values(mask, lengths),
            "advantages": ragged_from_values(torch.randn(total, generator=generator) * mask, lengths),
            "returns": ragged_from_values(torch.randn(total, generator=generator) * mask, lengths),
        }
    )


def rows_of(sequences: list[list[int]], masks: list[list[int]]) -> TensorDict:
    """Rows written out by hand."""
    return make_shard(
        {
            "row_ids": torch.arange(len(sequences)),
            "input_ids": ragged_from_rows([torch.tensor(row) for row in sequences], torch.int64),
            "response_mask": ragged_from_rows([torch.tensor(row) for row in masks], torch.bool),
        }
    )


def plans(rows: TensorDict, **settings: Any) -> list[UpdatePlan]:
    """Update plans of these rows."""
    lengths = row_lengths(rows.get("input_ids"))
    names = set(rows.keys())
    mask = rows.get("train_mask" if "train_mask" in names else "response_mask")
    owners = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    trained = torch.zeros_like(lengths).index_add_(0, owners, mask.values().long())
    return make_update_plans(
        rows["row_ids"].tolist(), lengths.tolist(), trained.tolist(), **{"micro_batch_size": 3, **settings}
    )


def scored(worker: ActorWorker, rows: TensorDict) -> TensorDict:
    """The rows with the actor's own log-probs."""
    return join_columns([rows, worker.compute_log_probs(rows, TEMPERATURE)[1].exclude("entropy")])


def weights_of(worker: ActorWorker) -> dict[str, torch.Tensor]:
    """Whole weights by name, copied."""
    return {name: tensor.clone() for bucket in worker.export_weights() for name, tensor in bucket}


def largest_gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
