"""The actor's update against a bare torch loop, and the memory of log-probs in chunks against whole.

    python -m benchmarks.train_step [--json] [--model built | smollm2] [--rounds 5]

Both loops train the same model on the same rows with the same micro-batches and count real tokens only, padding not.
The bare loop is what one writes by hand: logits of every position, log-softmax, a clipped ratio, backward, a fused
AdamW. Rounds alternate, so that a change of the machine's speed meets both. Memory is measured in a fresh process
each, as the highest resident set over the one before the pass.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.figure import Figure, report
from configs.environment import apply_defaults

apply_defaults()

import torch  # noqa: E402 - the environment is read when torch is imported
from tensordict import TensorDict  # noqa: E402

from configs.model import ModelConfig, ModelShape, OptimizerConfig  # noqa: E402
from configs.training import TrainedRoleConfig  # noqa: E402
from resources.batch import join_columns, make_shard, ragged_from_values, select_rows  # noqa: E402
from resources.models.causal_lm import build_causal_lm  # noqa: E402
from resources.models.log_probs import chunked_log_probs, log_probs_from_logits  # noqa: E402
from resources.models.packaged import fetch_packaged_model  # noqa: E402
from resources.update_plan import UpdatePlan, make_update_plans  # noqa: E402
from resources.workers.actor import ActorWorker  # noqa: E402
from resources.workers.padding import pad_rows  # noqa: E402
from tasks.algorithms.objectives import actor_objective  # noqa: E402

MIN_SPEED = 0.90
MAX_MEMORY = 0.25
TOKENS, VOCABULARY, WIDTH = 4096, 49_152, 576
"""Of the memory measurement: a micro-batch of 4,096 tokens, SmolLM2's vocabulary and width."""
CLIP = 0.2
OPTIMIZER = OptimizerConfig(lr=1e-5)
BUILT = ModelShape(
    num_layers=6,
    hidden_size=256,
    intermediate_size=768,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=8_192,
    max_positions=512,
)


def make_rows(count: int, prompt: tuple[int, int], response: tuple[int, int], vocabulary: int) -> TensorDict:
    """Rows with prompts and responses of random lengths between two bounds."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(prompt[0], prompt[1] + 1, (count,), generator=generator)
    lengths = prompts + torch.randint(response[0], response[1] + 1, (count,), generator=generator)
    place = torch.cat([torch.arange(int(length)) for length in lengths])
    mask = place >= prompts.repeat_interleave(lengths)
    total = int(lengths.sum())
    return make_shard(
        {
            "row_ids": torch.arange(count),
            "input_ids": ragged_from_values(torch.randint(3, vocabulary, (total,), generator=generator), lengths),
            "response_mask": ragged_from_values(mask, lengths),
            "advantages": ragged_from_values(torch.randn(total, generator=generator) * mask, lengths),
        }
    )


def plan_of(rows: TensorDict, micro_batch_size: int) -> UpdatePlan:
    """One optimizer step on all rows."""
    lengths = rows.get("input_ids").offsets().diff()
    starts = rows.get("response_mask").offsets()[:-1].tolist()
    mask = rows.get("response_mask").values()
    trained = [int(mask[start : start + length].sum()) for start, length in zip(starts, lengths.tolist(), strict=True)]
    return make_update_plans(rows["row_ids"].tolist(), lengths.tolist(), trained, micro_batch_size=micro_batch_size)[0]


def bare_loop(model: ModelConfig, rows: TensorDict, plan: UpdatePlan) -> Callable[[], None]:
    """A training step as one writes it by hand."""
    network = build_causal_lm(model, 0).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=OPTIMIZER.lr, weight_decay=0.0, fused=True)

    def step() -> None:
        for mini in plan.mini_batches:
            for row_ids in mini.micro_batches:
                batch = pad_rows(select_rows(rows, row_ids))
                ids, mask = batch["input_ids"], batch["response_mask"][:, 1:]
                logits = network(input_ids=ids, use_cache=False).logits[:, :-1].float()
                log_probs = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
                ratio = (log_probs - batch["old_log_probs"][:, 1:]).exp()
                advantages = batch["advantages"][:, 1:]
                gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
                (-torch.where(mask, gain, 0.0).sum() / mini.num_response_tokens).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), OPTIMIZER.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    return step


def seconds_of(step: Callable[[], object]) -> float:
    begun = time.monotonic()
    step()
    return time.monotonic() - begun


def measure_speed(name: str, model: ModelConfig, rows: TensorDict, micro_batch_size: int, rounds: int) -> list[Figure]:
    """Tokens a second of the worker's update over those of the bare loop, in alternating rounds."""
    plan = plan_of(rows, micro_batch_size)
    settings = TrainedRoleConfig(optimizer=OPTIMIZER, micro_batch_size=micro_batch_size)
    worker = ActorWorker(model, settings, 0)
    rows = join_columns([rows, worker.compute_log_probs(rows)[1].exclude("entropy")])
    loss = functools.partial(
        actor_objective, policy_loss="ppo", aggregation="token-mean", clip_ratio_low=CLIP, clip_ratio_high=CLIP
    )
    bare = bare_loop(model, rows, plan)
    ours = functools.partial(worker.update, rows, plan, loss)
    for warm_up in (bare, ours):
        warm_up()
    pairs = [(seconds_of(bare), seconds_of(ours)) for _ in range(rounds)]
    ratios = sorted(left / right for left, right in pairs)
    tokens = int(rows.get("input_ids").values().numel())
    ratio = statistics.median(ratios)
    speed = tokens / statistics.median(right for _, right in pairs)
    spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
    return [
        Figure(
            name=f"actor_update_speed_{name}",
            value=round(ratio, 4),
            unit="of bare loop",
            target=MIN_SPEED,
            better="higher",
            note=spread,
        ),
        Figure(name=f"actor_update_{name}", value=round(speed, 1), unit="tokens/s", better="higher"),
    ]


def memory_of(kind: str) -> int:
    """Bytes that a pass forward and backward adds to a fresh process, `kind` being whole or chunked."""
    command = [sys.executable, "-m", "benchmarks.train_step", "--memory", kind]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout.split()[-1])


def pass_memory(kind: str) -> int:
    """In the fresh process: the highest resident set during the pass, less the one before."""
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH).mul_(0.02).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    torch.mm(hidden[:8], weight[:8].t()).sum().backward()  # starts threads and buffers of the libraries
    hidden.grad = weight.grad = None
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    if kind == "whole":
        log_probs = log_probs_from_logits(hidden @ weight.t(), targets)[0]
    else:
        settings = TrainedRoleConfig()
        log_probs = chunked_log_probs(hidden, weight, targets, chunk_tokens=settings.log_prob_chunk_tokens)[0]
    log_probs.sum().backward()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure_memory() -> list[Figure]:
    """Memory of log-probs in chunks over that of the whole computation."""
    whole, chunked = memory_of("whole"), memory_of("chunked")
    ratio = chunked / whole
    spread = f"{chunked / 2**20:.0f} of {whole / 2**20:.0f} MiB"
    return [Figure(name="log_prob_memory", value=round(ratio, 4), unit="of whole", target=MAX_MEMORY, note=spread)]


def measure(model: str, rounds: int) -> list[Figure]:
    """All lines."""
    lines = measure_memory()
    if model == "smollm2":
        real = fetch_packaged_model("smollm2")
        rows = make_rows(16, (20, 40), (24, 48), VOCABULARY)
        return lines + measure_speed("smollm2", real, rows, 4, rounds)
    built = ModelConfig(build="tiny", shape=BUILT)
    ragged = make_rows(32, (16, 48), (16, 96), BUILT.vocab_size)
    even = make_rows(32, (32, 32), (64, 64), BUILT.vocab_size)
    return lines + measure_speed("ragged", built, ragged, 8, rounds) + measure_speed("even", built, even, 8, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", choices=("built", "smollm2"), default="built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", choices=("whole", "chunked"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(pass_memory(options.memory))
        return 0
    return report(measure(options.model, options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
