"""Sampling through the rollout worker against vLLM's own `LLM.generate`, on the same prompts, seeds and engine.

    python -m benchmarks.rollout [--json] [--rounds 7] [--only NUMBER]

The worker's side is everything a step pays for: reading prompts, requests, the step loop, telemetry, and the finished
shard. vLLM's side is one `LLM.generate` call with token ids, seeds and log-probs, as a user of vLLM alone would write
it. Both take turns in one process; ratios are of pairs, medians over the rounds, with the quartiles beside them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.figure import Figure, report
from configs.environment import apply_defaults

apply_defaults()

from configs.data import DataConfig, SourceConfig  # noqa: E402 - the environment is read when torch is imported
from configs.model import ModelConfig, ModelShape  # noqa: E402
from configs.rollout import RolloutConfig  # noqa: E402
from resources.engines.base import Sampling  # noqa: E402
from resources.engines.vllm import SamplingParams, VllmEngine  # noqa: E402
from resources.rollout_rows import requests_of, rows_of  # noqa: E402
from resources.workers.rollout import RolloutWorker  # noqa: E402

MIN_RATIO = 0.95


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One set of prompts on one model."""

    name: str
    shape: ModelShape
    prompts: int
    group_size: int
    response_length: int


WORKLOADS = (
    Workload(
        name="quick start: 512 short answers",
        shape=ModelShape(
            num_layers=4, hidden_size=128, intermediate_size=384, num_heads=4, vocab_size=104, max_positions=128
        ),
        prompts=64,
        group_size=8,
        response_length=8,
    ),
    Workload(
        name="small model: 64 responses of 96 tokens",
        shape=ModelShape(
            num_layers=6,
            hidden_size=256,
            intermediate_size=1024,
            num_heads=8,
            num_kv_heads=4,
            vocab_size=8192,
            max_positions=256,
        ),
        prompts=16,
        group_size=4,
        response_length=96,
    ),
)


def build_worker(workload: Workload) -> RolloutWorker:
    """A worker whose responses have one length, so that both sides do the same work whatever is sampled."""
    source = SourceConfig(name="sort", kind="sorting", size=2000)
    return RolloutWorker(
        RolloutConfig(group_size=workload.group_size, max_response_length=workload.response_length),
        ModelConfig(build="tiny", shape=workload.shape),
        DataConfig(sources=(source,), prompts_per_iteration=workload.prompts, max_prompt_length=16),
        0,
    )


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(workload: Workload, rounds: int) -> list[Figure]:
    """Both sides in turn."""
    worker = build_worker(workload)
    engine: Any = worker.engine
    assert isinstance(engine, VllmEngine)
    slice_ = worker.prompts.rows(0, 0, workload.prompts)
    rows = rows_of(slice_.prompts, workload.group_size, worker.stride)
    requests = requests_of(rows, worker.run_seed, 0, workload.response_length)
    sampling = Sampling.from_config(worker.rollout.sampling, worker.eos_token_ids)
    prompts: Any = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]

    def ours() -> Any:
        return worker.sample(0, 0, workload.prompts, workload.group_size, 0)

    def theirs() -> Any:
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                seed=request.seed,
                max_tokens=request.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for request in requests
        ]
        return engine._llm.generate(prompts, params, use_tqdm=False)

    _, shard = ours()
    same = [output.outputs[0].token_ids for output in theirs()]
    tokens = int(shard["response_lengths"].sum())
    if tokens != sum(len(ids) for ids in same):
        raise RuntimeError("both sides must sample the same tokens; the comparison would mean nothing")
    ratios: list[float] = []
    speeds: list[float] = []
    for number in range(rounds):
        first, second = (ours, theirs) if number % 2 else (theirs, ours)
        times = {first: seconds(first), second: seconds(second)}
        ratios.append(times[theirs] / times[ours])
        speeds.append(tokens / times[ours])
    engine.shutdown()
    ratio = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4)
    return [
        Figure(
            name=f"{workload.name}: speed over LLM.generate",
            value=round(ratio, 3),
            unit="ratio",
            target=MIN_RATIO,
            better="higher",
            note=f"quartiles {low:.3f} to {high:.3f}; {statistics.median(speeds):,.0f} tokens/s, {tokens} tokens",
        )
    ]


def main() -> int:
    """Run, print, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", type=int, choices=range(len(WORKLOADS)), help="one workload, by its number")
    options = parser.parse_args()
    chosen = WORKLOADS if options.only is None else WORKLOADS[options.only : options.only + 1]
    return report((figure for workload in chosen for figure in measure(workload, options.rounds)), options.json)


if __name__ == "__main__":
    sys.exit(main())
