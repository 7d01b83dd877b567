"""What an update of a real model gains on CPUs from how it is run: each setting left out, one at a time.

    python -m benchmarks.update_settings [--json] [--rounds 5] [--tokens 32] [--dtype bfloat16]

SmolLM2-135M, in bfloat16 where the CPU has it, else in float32: 8 prompts of 30 tokens with 4 responses each, one
micro-batch, two threads. Each variant is a process of its own, since the settings are read at its start; the
ratio is its median over that of the settings as shipped, which are measured before and after the others.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.arithmetic import FASTEST
from benchmarks.figure import Figure, report
from configs.environment import DEFAULTS, apply_defaults

apply_defaults()

from configs.model import ModelConfig  # noqa: E402
from configs.training import TrainedRoleConfig  # noqa: E402
from resources.ranks import KEPT_MEMORY  # noqa: E402

PROMPTS, SIBLINGS, PROMPT_TOKENS, VOCABULARY = 8, 4, 30, 49_000
SPINS = "GOMP_SPINCOUNT"
VARIANTS: dict[str, tuple[dict[str, str], bool]] = {
    "memory given back to the system": (dict.fromkeys(KEPT_MEMORY, ""), True),
    "waiting threads sleep at once": ({SPINS: "0"}, True),
    "prompts apart, with padding": ({}, False),
}
"""Environment of the process (an empty value: not set), and `model.share_prompts`."""


def update_seconds(tokens: int, dtype: str, shares: bool, rounds: int) -> list[float]:
    """Seconds of `rounds` updates in this process, after two that warm up."""
    import torch

    from benchmarks.peers import smollm2_folder
    from resources.batch import make_shard, ragged_from_rows
    from resources.micro_batches import Siblings
    from resources.update_plan import make_update_plans
    from resources.workers.actor import ActorWorker
    from tasks.algorithms.objectives import actor_objective

    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=draw)
    groups = torch.arange(PROMPTS).repeat_interleave(SIBLINGS)
    rows = [torch.cat([prompts[g], torch.randint(5, VOCABULARY, (tokens,), generator=draw)]) for g in groups.tolist()]
    masks = [torch.arange(PROMPT_TOKENS + tokens) >= PROMPT_TOKENS for _ in rows]
    shard = make_shard(
        {
            "row_ids": torch.arange(len(rows)),
            "group_ids": groups,
            "input_ids": ragged_from_rows(rows, torch.int64),
            "response_mask": ragged_from_rows(masks, torch.bool),
            "train_mask": ragged_from_rows(masks, torch.bool),
            "advantages": ragged_from_rows([mask.float() for mask in masks], torch.float32),
            "old_log_probs": ragged_from_rows([-mask.float() for mask in masks], torch.float32),
        }
    )
    model = ModelConfig.model_validate({"path": str(smollm2_folder()), "dtype": dtype, "share_prompts": shares})
    worker = ActorWorker(model, TrainedRoleConfig(micro_batch_size=len(rows)), 0, threads=2)
    siblings = Siblings(groups=groups.tolist(), prompts=[PROMPT_TOKENS] * len(rows))
    lengths, trained = [len(row) for row in rows], [tokens] * len(rows)
    plan = make_update_plans(
        list(range(len(rows))), lengths, trained, micro_batch_size=len(rows), siblings=siblings if shares else None
    )[0]
    loss = functools.partial(
        actor_objective, policy_loss="ppo", aggregation="token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    seconds: list[float] = []
    for _ in range(rounds + 2):
        begun = time.monotonic()
        worker.update(shard, plan, loss)
        seconds.append(time.monotonic() - begun)
    return seconds[2:]


def in_a_process(environment: dict[str, str], shares: bool, options: argparse.Namespace) -> list[float]:
    """The same in a process with the environment of a worker, changed as told."""
    shipped = {**os.environ, **DEFAULTS, **KEPT_MEMORY, "OMP_NUM_THREADS": "2", **environment}
    command = [sys.executable, "-m", "benchmarks.update_settings", "--own", "apart" if not shares else "once"]
    command += ["--rounds", str(options.rounds), "--tokens", str(options.tokens), "--dtype", options.dtype]
    ended = subprocess.run(
        command,
        env={key: value for key, value in shipped.items() if value},
        capture_output=True,
        text=True,
        check=True,
        timeout=1800,
    )
    return json.loads(ended.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> list[Figure]:
    """One ratio a variant: how much longer an update takes without what is shipped."""
    before = in_a_process({}, True, options)
    found = {name: in_a_process(environment, shares, options) for name, (environment, shares) in VARIANTS.items()}
    shipped = before + in_a_process({}, True, options)
    usual = statistics.median(shipped)
    figures = [
        Figure(
            name=f"update_{options.dtype}_{options.tokens}_tokens",
            value=round(usual, 3),
            unit="s",
            note=f"{min(shipped):.2f} to {max(shipped):.2f}",
        )
    ]
    for name, seconds in found.items():
        ratio = statistics.median(seconds) / usual
        spread = f"{min(seconds):.2f} to {max(seconds):.2f} s"
        figures.append(Figure(name=f"{name} / as shipped", value=round(ratio, 3), unit="ratio", note=spread))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=FASTEST)
    parser.add_argument("--own", choices=("once", "apart"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        print(json.dumps(update_seconds(options.tokens, options.dtype, options.own == "once", options.rounds)))
        return 0
    return report(measure(options), as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
