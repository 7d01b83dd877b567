"""One GPU, in minutes: is it right, and how fast? Workers in-process, the transformers engine; see gpu_check.sh.

    python -m benchmarks.gpu_check [--json] [--cpu]

Right: the same model, rows and seed on the GPU and, in a process that sees no GPU, on the CPU: log-probs, loss, norm of
the gradient, what two optimizer steps change (the weights by how much, the log-probs one by one, each in proportion to
the change itself), greedy tokens. Fast: tokens a second of update, scoring and sampling in bfloat16, medians of five,
with the model's share of the card's peak. Memory: what a pass of log-probs forward and backward adds, in chunks and
whole. `--cpu` exercises all of it without a GPU on a small model, and says so: its figures are no GPU's.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NEEDED = ("torch", "transformers", "tensordict", "pydantic", "yaml", "xxhash", "peft", "jaxtyping", "accelerate")
PACKAGES = {"yaml": "pyyaml"}
MAX_GAP = 1e-3
"""Of log-probs, and relative of loss, norm and change of the weights: float32 on both, sums in another order."""
MAX_MOVE_GAP = 0.01
"""Of how two steps moved the log-probs, over the largest move (4e-6 between two kinds of sums on a CPU)."""
MAX_MEMORY = 0.25
ROUNDS = 5
SPEEDS = ("tokens_per_second", "flop_utilisation")
TOKENS, VOCABULARY = 4096, 49_152
SMOLLM2 = {"num_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3,
           "vocab_size": VOCABULARY, "max_positions": 1024}  # fmt: skip
SMALL = {"num_layers": 4, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "vocab_size": 1024,
         "max_positions": 512}  # fmt: skip


def missing_packages() -> list[str]:
    """What this machine lacks, by the names that pip knows."""
    return [PACKAGES.get(name, name) for name in NEEDED if importlib.util.find_spec(name) is None]


def rows_of(count: int, prompt: int, response: int, vocabulary: int) -> Any:
    """Rows of even length with advantages, the same on every machine."""
    import torch

    from resources.batch import make_shard, ragged_from_values

    generator = torch.Generator().manual_seed(0)
    length = prompt + response
    lengths = torch.full((count,), length)
    ids = torch.randint(3, vocabulary, (count * length,), generator=generator)
    mask = (torch.arange(length) >= prompt).repeat(count)
    advantages = torch.randn(count * length, generator=generator) * mask
    return make_shard(
        {
            "row_ids": torch.arange(count),
            "group_ids": torch.arange(count),
            "input_ids": ragged_from_values(ids, lengths),
            "response_mask": ragged_from_values(mask, lengths),
            "advantages": ragged_from_values(advantages, lengths),
        }
    )


def make_actor(shape: dict[str, int], dtype: str, micro_batch_size: int) -> Any:
    """An actor in this process, on the accelerator it sees."""
    from configs.model import ModelConfig, ModelShape, OptimizerConfig
    from configs.training import TrainedRoleConfig
    from resources.workers.actor import ActorWorker

    model = ModelConfig(build="tiny", shape=ModelShape.model_validate(shape), dtype=dtype)  # pyright: ignore[reportArgumentType]
    settings = TrainedRoleConfig(optimizer=OptimizerConfig(lr=1e-4), micro_batch_size=micro_batch_size)
    return ActorWorker(model, settings, 0)


def update_of(actor: Any, rows: Any, micro_batch_size: int, steps: int) -> Any:
    """A call that trains on `rows`, in so many optimizer steps."""
    from resources.update_plan import make_update_plans
    from tasks.algorithms.objectives import actor_objective

    lengths = rows.get("input_ids").offsets().diff().tolist()
    trained = [int(part.sum()) for part in rows.get("response_mask").unbind()]
    plan = make_update_plans(
        rows["row_ids"].tolist(), lengths, trained, micro_batch_size=micro_batch_size, num_mini_batches=steps
    )[0]
    loss = functools.partial(
        actor_objective, policy_loss="ppo", aggregation="token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    return functools.partial(actor.update, rows, plan, loss)


def facts_here() -> dict[str, Any]:
    """What both devices must agree on."""
    import torch

    from resources.engines.base import GenerationRequest, Sampling
    from resources.engines.huggingface import HuggingFaceEngine
    from resources.models.causal_lm import prepare_model_folder

    actor, rows = make_actor(SMALL, "float32", 4), rows_of(16, 8, 24, SMALL["vocab_size"])
    with tempfile.TemporaryDirectory() as cache:
        folder = prepare_model_folder(actor.model_config, 0, Path(cache))
        engine = HuggingFaceEngine(str(folder), dtype="float32", slots=8)
    requests = [GenerationRequest(row_id=k, prompt_ids=(5 + k, 6, 7), seed=k, max_tokens=12) for k in range(4)]
    outputs = engine.generate(requests, Sampling(greedy=True))
    before = log_probs_of(actor, rows)
    weights = [value.detach().double().clone() for _, value in actor.module.named_parameters()]
    metrics = update_of(actor, rows, 4, 2)()["metrics"]
    changes = [
        value.detach().double() - old for (_, value), old in zip(actor.module.named_parameters(), weights, strict=True)
    ]
    after = log_probs_of(actor, rows)
    return {
        "device": str(actor.device),
        "log_probs": before,
        "moves": [new - old for new, old in zip(after, before, strict=True)],
        "loss": metrics["actor/loss"],
        "grad_norm": metrics["actor/grad_norm"],
        "change of the weights": sum(float(change.pow(2).sum()) for change in changes) ** 0.5,
        "greedy": [list(output.token_ids) for output in outputs],
        "torch": torch.__version__,
    }


def correctness() -> list[dict[str, Any]]:
    """This process's device against a process that sees no accelerator."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--facts"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True)
    return compare(facts_here(), json.loads(ended.stdout.splitlines()[-1]))


def compare(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One line a fact of `facts_here`: how far the device is from the CPU."""
    devices = f"{found['device']} against {expected['device']}"
    gap = largest(a - b for a, b in zip(found["log_probs"], expected["log_probs"], strict=True))
    apart = largest(a - b for a, b in zip(found["moves"], expected["moves"], strict=True))
    moved = share(apart, largest(expected["moves"]))
    lines = [_line(f"log-probs, {devices}: largest gap", gap, "nats", MAX_GAP)]
    for name in ("loss", "grad_norm", "change of the weights"):
        relative = share(abs(found[name] - expected[name]), abs(expected[name]))
        lines.append(_line(f"{name} after two steps: relative gap", relative, "", MAX_GAP))
    lines.append(_line("moves of the log-probs after two steps: relative gap", moved, "", MAX_MOVE_GAP))
    differing = sum(a != b for a, b in zip(found["greedy"], expected["greedy"], strict=True))
    return [*lines, _line("greedy responses that differ, of 4", differing, "", 0)]


def largest(values: Iterable[float]) -> float:
    """The largest size; nan when one is none, wherever it stands.

    >>> largest([-2.0, 1.0]), largest([1.0, math.nan])
    (2.0, nan)
    """
    sizes = [abs(value) for value in values]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)


def share(gap: float, size: float) -> float:
    """`gap` over the `size` of what it is a gap of; nothing that is expected to be 0 can be told from nothing done."""
    return gap / size if size else math.nan


def log_probs_of(actor: Any, rows: Any) -> list[float]:
    """Of each token of the rows."""
    return actor.compute_log_probs(rows)[1].get("old_log_probs").values().tolist()


def speed(shape: dict[str, int], rows: int, length: int) -> list[dict[str, Any]]:
    """Tokens a second in bfloat16, and the share of the card's peak."""
    micro = 8
    actor, batch = make_actor(shape, "bfloat16", micro), rows_of(rows, length // 4, length - length // 4,
                                                                  shape["vocab_size"])  # fmt: skip
    update = update_of(actor, batch, micro, 1)
    lines = []
    for name, call in {"update": update, "scoring": lambda: actor.compute_log_probs(batch)[0]}.items():
        call()
        spans = [call()["spans"] for _ in range(ROUNDS)]
        middle = {key: statistics.median(span[key] for span in spans) for key in SPEEDS if key in spans[0]}
        lines.append(_line(f"{name}, bfloat16", middle["tokens_per_second"], "tokens/s", better="higher"))
        if "flop_utilisation" in middle:
            lines.append(_line(f"{name}: share of the card's peak", middle["flop_utilisation"], "", better="higher"))
        lines.append(_line(f"{name}: peak memory", max(span["peak_memory_bytes"] for span in spans) / 2**20, "MiB"))
    return [*lines, _sampling_speed(actor, min(rows, 64))]


def _sampling_speed(actor: Any, rows: int) -> dict[str, Any]:
    from resources.engines.base import GenerationRequest, Sampling
    from resources.engines.huggingface import HuggingFaceEngine
    from resources.models.causal_lm import prepare_model_folder

    with tempfile.TemporaryDirectory() as cache:
        folder = prepare_model_folder(actor.model_config, 0, Path(cache))
        engine = HuggingFaceEngine(str(folder), dtype="bfloat16", slots=rows)
    requests = [GenerationRequest(row_id=k, prompt_ids=(5, 6, 7, 8), seed=k, max_tokens=32) for k in range(rows)]
    engine.generate(requests[:2], Sampling())
    speeds: list[float] = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        outputs = engine.generate(requests, Sampling())
        speeds.append(sum(len(output.token_ids) for output in outputs) / (time.monotonic() - began))
    name = f"sampling with the transformers engine, {rows} rows"
    return _line(name, statistics.median(speeds), "tokens/s", better="higher")


def memory() -> list[dict[str, Any]]:
    """What log-probs of 4,096 tokens over 49,152 add, forward and backward."""
    import torch

    from benchmarks.train_step import memory_of

    if torch.cuda.is_available():
        chunked, whole = (_cuda_bytes(kind) for kind in ("chunked", "whole"))
    else:
        chunked, whole = (memory_of(kind) for kind in ("chunked", "whole"))
    note = f"{chunked / 2**20:.0f} of {whole / 2**20:.0f} MiB"
    return [_line("memory of log-probs, chunked / whole", chunked / whole, "", MAX_MEMORY, note=note)]


def _cuda_bytes(kind: str) -> int:
    import torch

    from resources.models.log_probs import chunked_log_probs, log_probs_from_logits

    hidden = torch.randn(TOKENS, SMOLLM2["hidden_size"], device="cuda", requires_grad=True)
    weight = torch.randn(VOCABULARY, SMOLLM2["hidden_size"], device="cuda").mul_(0.02).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if kind == "whole":
        log_probs = log_probs_from_logits(hidden @ weight.t(), targets)[0]
    else:
        log_probs = chunked_log_probs(hidden, weight, targets)[0]
    log_probs.sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _line(
    name: str, value: float, unit: str, target: float | None = None, better: str = "lower", note: str = ""
) -> dict[str, Any]:
    ok = target is None or value <= target
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better, "ok": ok, "note": note}


def main() -> int:
    """Run, print, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="exercise the script on a machine without a GPU")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    missing = missing_packages()
    if missing:
        print(f"this machine lacks {missing}; pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    import torch

    if options.facts:
        print(json.dumps(facts_here()))
        return 0
    if not torch.cuda.is_available() and not options.cpu:
        print("torch sees no GPU here; --cpu exercises the script without one", file=sys.stderr)
        return 2
    device = "CPU, not a GPU: a small model, and no figure below is a GPU's"
    shape, rows, length = SMALL, 16, 64
    if torch.cuda.is_available():
        device, shape, rows, length = torch.cuda.get_device_name(), SMOLLM2, 128, 512
    print(f"device: {device}; torch {torch.__version__}", file=sys.stderr)
    lines = [*correctness(), *speed(shape, rows, length), *memory()]
    for line in lines:
        if options.json:
            print(json.dumps({**line, "device": device}))
        else:
            verdict = "" if line["target"] is None else "ok" if line["ok"] else "MISSED"
            target = "" if line["target"] is None else f"<= {line['target']:g}"
            print(f"{line['name']:58} {line['value']:12.5g} {line['unit']:9} {target:9} {verdict:7} {line['note']}")
    return 0 if all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
