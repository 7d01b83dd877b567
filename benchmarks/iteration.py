"""A whole iteration against a bare loop of plain torch and vLLM on the same work: `python -m benchmarks.iteration`.

Both sample the same prompts with the same seeds, score them under actor and reference, and take the same optimizer
steps on the same real tokens; the bare loop is written without anything of ours but the data. The framework side runs
in one process through the workers, so the ratio is the price of rows, plans, metrics and checks; what Prefect and
Ray add to an iteration is `benchmarks.controller_tax`.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from configs.environment import apply_defaults

apply_defaults()

import torch  # noqa: E402 - reads the environment when it is imported
from tensordict import TensorDict  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from configs.load import load_config  # noqa: E402
from resources.batch import columns_of, join_columns, make_shard, ragged_from_values, row_lengths, to_padded  # noqa: E402
from resources.engines.base import Sampling  # noqa: E402
from resources.engines.vllm import sampling_params  # noqa: E402
from resources.rollout_rows import requests_of, rows_of  # noqa: E402
from resources.update_plan import make_update_plans  # noqa: E402
from resources.workers.actor import ActorWorker  # noqa: E402
from resources.workers.reference import ReferenceWorker  # noqa: E402
from resources.workers.rollout import RolloutWorker  # noqa: E402
from tasks.objectives_of import actor_loss  # noqa: E402
from tasks.on_rows import update_facts  # noqa: E402

TARGET = 1.15
ROUNDS = 5
SETTINGS = (
    "model.shape.num_layers=4",
    "model.shape.hidden_size=256",
    "model.shape.intermediate_size=768",
    "data.prompts_per_iteration=64",
    "rollout.group_size=4",
    "rollout.max_response_length=24",
    "rollout.max_model_length=48",
    "algorithm.num_mini_batches=1",
    "algorithm.num_ppo_epochs=1",
    "algorithm.kl.coef=0.01",
    "actor.micro_batch_size=64",
    "sft.steps=0",
)


class Ours:
    """One iteration through the workers."""

    def __init__(self) -> None:
        self.config = load_config("quickstart-grpo", SETTINGS)
        model, seed = self.config.model, self.config.seed
        self.actor = ActorWorker(model, self.config.actor, seed, threads=1)
        self.reference = ReferenceWorker(model, self.config.actor, seed, threads=1)
        self.rollout = RolloutWorker(self.config.rollout, model, self.config.data, seed, threads=1)
        self.loss = actor_loss(self.config)

    def sample(self, iteration: int) -> TensorDict:
        """The rollout batch."""
        count, size = self.config.data.prompts_per_iteration, self.config.rollout.group_size
        return self.rollout.sample(0, iteration * count, count, size, iteration)[1]

    def score_and_update(self, rows: TensorDict) -> None:
        """Log-probs, reference, advantages of a fixed pattern, one optimizer step."""
        _, old = self.actor.compute_log_probs(rows)
        _, reference = self.reference.score(rows)
        batch = join_columns([rows, old, reference, advantages_for(rows)])
        row_ids, lengths, trained = update_facts(batch)
        plan = make_update_plans(row_ids, lengths, trained, micro_batch_size=self.config.actor.micro_batch_size)[0]
        self.actor.update(batch, plan, self.loss)


class Bare:
    """The same in plain torch and vLLM."""

    def __init__(self, ours: Ours) -> None:
        self.ours = ours
        self.model: PreTrainedModel = ours.actor.module.lm
        self.frozen: PreTrainedModel = ours.reference.module.lm
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        engine: Any = ours.rollout.engine
        self.llm = engine._llm

    def sample(self, iteration: int) -> None:
        """vLLM's own generate call on the same prompts and seeds."""
        rollout, config = self.ours.rollout, self.ours.config
        count, size = config.data.prompts_per_iteration, config.rollout.group_size
        rows = rows_of(rollout.prompts.rows(0, iteration * count, count).prompts, size, rollout.stride)
        requests = requests_of(rows, rollout.run_seed, iteration, config.rollout.max_response_length)
        sampling = Sampling.from_config(config.rollout.sampling, rollout.eos_token_ids)
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        self.llm.generate(prompts, [sampling_params(request, sampling) for request in requests], use_tqdm=False)

    def score_and_update(self, rows: TensorDict) -> None:
        """Whole-batch tensors padded to each micro-batch's longest row, sorted by length as ours are."""
        columns = columns_of(rows)
        lengths = row_lengths(columns["input_ids"])
        order = torch.argsort(lengths).split(self.ours.config.actor.micro_batch_size)
        ids, mask = to_padded(columns["input_ids"]), to_padded(columns["response_mask"])
        total = mask.sum()
        with torch.no_grad():
            old = [log_probs(self.model, ids[part, : lengths[part].max()]) for part in order]
            reference = [log_probs(self.frozen, ids[part, : lengths[part].max()]) for part in order]
        for part, before, frozen in zip(order, old, reference, strict=True):
            width = int(lengths[part].max())
            now = log_probs(self.model, ids[part, :width])
            ratio, gap = torch.exp(now - before), frozen - now
            loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)) + 0.01 * (gap.exp() - gap - 1)
            (loss * mask[part, 1:width]).sum().div(total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def log_probs(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [b, t-1] of each token given those before it."""
    logits = model(ids).logits[:, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def advantages_for(rows: TensorDict) -> TensorDict:
    """+1 and -1 in turn, so that both sides do the same arithmetic without a reward."""
    columns = columns_of(rows)
    mask = columns["response_mask"]
    signs = torch.tensor([1.0 if row % 2 else -1.0 for row in columns["row_ids"].tolist()])
    values = signs.repeat_interleave(row_lengths(mask)) * mask.values()
    advantages = ragged_from_values(values, row_lengths(mask))
    return make_shard({"row_ids": columns["row_ids"].clone(), "advantages": advantages, "train_mask": mask})


def seconds(call: Callable[[], object]) -> float:
    """Wall time of a call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> int:
    """Ratios of medians, both sides in turn within one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ours = Ours()
    bare = Bare(ours)
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for iteration in range(arguments.rounds + 1):
        rows = ours.sample(iteration)
        pair = {
            "ours": seconds(lambda i=iteration: ours.sample(i)) + seconds(lambda r=rows: ours.score_and_update(r)),
            "bare": seconds(lambda i=iteration: bare.sample(i)) + seconds(lambda r=rows: bare.score_and_update(r)),
        }
        if iteration:  # the first round warms up
            for side, value in pair.items():
                times[side].append(value)
    ratios = sorted(a / b for a, b in zip(times["ours"], times["bare"], strict=True))
    ratio = statistics.median(ratios)
    line = {
        "name": f"iteration / bare torch + vLLM (spread {ratios[0]:.2f} to {ratios[-1]:.2f})",
        "value": ratio,
        "unit": "x",
        "target": TARGET,
        "better": "lower",
        "ok": ratio <= TARGET,
    }
    print(json.dumps(line) if arguments.json else f"{line['name']}: {ratio:.3f} (target <= {TARGET})")
    return 0 if line["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
