"""What compiling the engine on CPUs gains a step and costs a start: `rollout.enforce_eager` true and false.

    python -m benchmarks.compiled_sampling [--json] [--rounds 7]

SmolLM2-135M, in bfloat16 where the CPU has it, else in float32: 8 prompts of 30 tokens with 4 responses of 32 each, two
threads. Each engine is a process of its own, the eager one first and last; the compiling one starts
twice, first without anything that was kept.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.arithmetic import FASTEST
from benchmarks.figure import Figure, report
from configs.environment import DEFAULTS, apply_defaults

apply_defaults()

from resources.ranks import KEPT_MEMORY  # noqa: E402

PROMPTS, SIBLINGS, PROMPT_TOKENS, TOKENS, VOCABULARY = 8, 4, 30, 32, 49_000


def sample(is_eager: bool, rounds: int) -> dict[str, Any]:
    """Seconds of a start and of `rounds` samplings after two that warm up, in this process."""
    import torch

    from benchmarks.peers import smollm2_folder
    from configs.rollout import RolloutConfig
    from resources.engines.base import GenerationRequest, Sampling
    from resources.engines.vllm import VllmEngine

    folder = str(smollm2_folder())
    rollout = RolloutConfig(max_response_length=TOKENS, max_running_sequences=32, enforce_eager=is_eager)
    begun = time.monotonic()
    engine = VllmEngine(rollout, folder, dtype=FASTEST, max_model_length=128, seed=1)
    started = time.monotonic() - begun
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=draw).tolist()
    requests = [
        GenerationRequest(row_id=row, prompt_ids=tuple(prompts[row // SIBLINGS]), seed=row, max_tokens=TOKENS)
        for row in range(PROMPTS * SIBLINGS)
    ]
    seconds: list[float] = []
    for _ in range(rounds + 2):
        begun = time.monotonic()
        outputs = engine.generate(requests, Sampling(stop_token_ids=()))
        seconds.append(time.monotonic() - begun)
        assert all(len(output.token_ids) == TOKENS for output in outputs), "both engines must sample as many tokens"
    engine.shutdown()
    return {"start": started, "seconds": seconds[2:]}


def in_a_process(engine: str, rounds: int, caches: dict[str, str]) -> dict[str, Any]:
    """The same in a process with the environment of a worker."""
    environment = {**os.environ, **DEFAULTS, **KEPT_MEMORY, "OMP_NUM_THREADS": "2", **caches}
    command = [sys.executable, "-m", "benchmarks.compiled_sampling", "--own", engine, "--rounds", str(rounds)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=900)
    return json.loads(next(line for line in ended.stdout.splitlines() if line.startswith('{"start"')))


def measure(rounds: int) -> list[Figure]:
    """The ratio of both, and what the starts took."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"VLLM_CACHE_ROOT": f"{folder}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        before = in_a_process("eager", rounds, caches)
        first, later = (in_a_process("compiled", rounds, caches) for _ in range(2))
        after = in_a_process("eager", rounds, caches)
    eager = before["seconds"] + after["seconds"]
    compiled = first["seconds"] + later["seconds"]
    ratio = statistics.median(compiled) / statistics.median(eager)
    note = (
        f"{statistics.median(compiled):.2f} s ({min(compiled):.2f} to {max(compiled):.2f}) and "
        f"{statistics.median(eager):.2f} s ({min(eager):.2f} to {max(eager):.2f})"
    )
    starts = f"eager {after['start']:.1f} s, compiled at first {first['start']:.1f} s, later {later['start']:.1f} s"
    return [
        Figure(
            name=f"sampling in {FASTEST}, compiled / eager", value=round(ratio, 3), unit="ratio", target=1.0, note=note
        ),
        Figure(name="a later start, compiled", value=round(later["start"], 1), unit="s", note=starts),
    ]


def main() -> int:
    """Run, print, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--own", choices=("eager", "compiled"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        print(json.dumps(sample(options.own == "eager", options.rounds)))
        return 0
    return report(measure(options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
