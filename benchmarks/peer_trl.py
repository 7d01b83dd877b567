"""TRL's side of the comparison; runs in an environment of its own and imports nothing of ours but the reward.

    .venv-peers/trl/bin/python -m benchmarks.peer_trl --model FOLDER --prompts FILE --tokens 32 --dtype bfloat16

Prints one line of JSON: seconds of each step, its mean reward, and the mean length of a response in tokens.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports] - in its own environment

from benchmarks.peer_rewards import digit_share

RESPONSES = 4


class StepTimes(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "reward" in logs:
            self.logged.append(logs)


def reward(completions: list[str], **_: Any) -> list[float]:
    """TRL's signature around the common reward."""
    return [digit_share(completion) for completion in completions]


def settings(options: argparse.Namespace, folder: str) -> GRPOConfig:
    """GRPO with a KL to the reference, one optimizer step on four responses a prompt, nothing saved or reported."""
    rows = options.num_prompts * RESPONSES
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=options.dtype == "bfloat16" and not options.pure,
        max_steps=options.steps,
        per_device_train_batch_size=min(options.batch, rows),
        gradient_accumulation_steps=max(1, rows // options.batch),
        gradient_checkpointing=False,
        num_generations=RESPONSES,
        num_iterations=1,
        max_completion_length=options.tokens,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=options.kl_coef,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


def main() -> int:
    """Train, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--pure", action="store_true", help="weights in the dtype itself, in place of autocast")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--kl-coef", type=float, default=0.01)
    parser.add_argument("--folder", default="trl-output")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.pure else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation=options.attention)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    rows = [json.loads(line) for line in Path(options.prompts).read_text().splitlines()]
    times = StepTimes()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(options, options.folder),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[times],
    )
    trainer.train()
    result = {
        "seconds": [later - earlier for earlier, later in zip(times.ends, times.ends[1:], strict=False)],
        "rewards": [float(logs["reward"]) for logs in times.logged],
        "lengths": [float(logs.get("completions/mean_length", 0.0)) for logs in times.logged],
        "kl": [float(logs.get("kl", -1.0)) for logs in times.logged],
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
