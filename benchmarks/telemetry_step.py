"""The telemetry of a quick-start step by itself: nine tasks of two ranks, clocks around every micro-batch.

The CPU time is taken around the functions that a run calls for its spans, in the workers, in the task host and in the
controller, without the work between them. Not in it: what Ray and Prefect carry, and Prometheus and sinks, which a run
has only where its config asks for them.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure
from benchmarks.telemetry import TASKS
from configs.load import load_config
from resources.engines.base import FinishReason, GenerationFacts, GenerationOutput
from resources.engines.generation_facts import close_facts
from resources.store import BatchStore, StoreView
from resources.telemetry.live import view_iteration
from resources.telemetry.recorder import SPANS_FILE, SpanFile
from resources.telemetry.rollout_gauge import RolloutGauge
from resources.telemetry.spans import IterationSpan, TaskSpan
from resources.workers.base import ModelWorker
from tasks.collect import payload_bytes
from tasks.host import HostContext, use_host
from tasks.outcome import _with_facts
from tasks.replies import _rank_span
from tasks.reward import reward_facts
from tasks.runner import _span_of, _Submission

QUICK_START_STEP_SECONDS = 1.3
"""One iteration of the quick start on two cores."""
_STEPS = 40
_RANKS = 2
_MICRO_BATCHES = 16
_DECODE_STEPS = 40
_RESPONSES = 512
_SLOTS = 64
_LENGTHS = [12] * (_RESPONSES // _RANKS)
_NODE = "10.0.0.1"
OUTPUTS = {
    row: GenerationOutput(
        row_id=row, token_ids=(5,) * 6, log_probs=(-1.0,) * 6, finish_reason=FinishReason.STOP, finish_seconds=1.0
    )
    for row in range(_RESPONSES // _RANKS)
}
"""What an engine answered; making it is the engine's work."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Of a step that ended what the spans of later ones ask: its name and span."""

    task_name: str
    made: TaskSpan

    def span(self) -> TaskSpan:
        """As `StepFuture.span`."""
        return self.made


def one_step(iteration: int, file: SpanFile, worker: ModelWorker) -> None:
    """Every telemetry call of one quick-start step, and none of its work. Call it under `use_host`."""
    began = time.monotonic()
    done: dict[str, Ended] = {}
    for task, (role, upstream) in TASKS.items():
        submitted = time.monotonic()
        statuses = [_status(worker, rank, role, task) for rank in range(_RANKS)]
        facts = reward_facts(statuses, ()) if role == "reward" else {}
        waited: Any = tuple(done[name] for name in upstream)
        sent = _Submission(
            task=task, role=role, pool="main", upstream=waited, submitted=submitted, bytes=4096, clock_offset=0.0
        )
        span = replace(_span_of(sent, _timing(statuses), (0.0, 1024)), iteration=iteration, attempt=1)
        done[task] = Ended(task_name=task, made=_with_facts(span, facts))
    spans = [one.made for one in done.values()]
    facts = {"controller_bytes": payload_bytes(spans), "attempts": 1, "between_seconds": 0.0}
    ended = IterationSpan(iteration=iteration, started=began, ended=time.monotonic(), facts=facts)
    view = view_iteration(spans, ended)
    view.metrics()
    file.append(*spans, ended)
    view.markdown()
    view.image_uri()


def _timing(statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a task host says of a step whose ranks answered so."""
    spans = [status["spans"] for status in statuses]
    wires = [{name: own.get(name, 0.0) for name in ("rank", "start", "end", "queue_seconds")} for own in spans]
    ranks = [_rank_span(wire, own, _NODE) for wire, own in zip(wires, spans, strict=True)]
    return {
        "node": _NODE,
        "unpack_seconds": 0.0,
        "started": spans[0]["start"],
        "ended": spans[-1]["end"],
        "collect_seconds": 0.0,
        "collect_bytes": 1024,
        "ranks": [rank.to_json() for rank in ranks],
    }


def _status(worker: ModelWorker, rank: int, role: str, task: str) -> dict[str, Any]:
    """What a rank answers, less its metrics."""
    if role in ("rollout", "reward"):
        start = time.monotonic()
        facts = _sampled() if role == "rollout" else {"rows": len(_LENGTHS)}
        spans = {"rank": rank, "start": start, "end": time.monotonic(), **facts}
        grader = {"name": "sorting", "kind": "rule", "workers": 2, "seconds": [1e-5] * len(_LENGTHS), "timeouts": 0}
        return {"spans": spans, "graders": [grader], "hidden_seconds": 0.0, "causes": []}
    watch = worker.stopwatch()
    is_update = task.endswith("update")
    passes = _MICRO_BATCHES if task in ("reference", "actor-log-probs", "critic-values") or is_update else 1
    for _ in range(passes):
        with watch.phase("forward"):
            pass
        if is_update:
            with watch.phase("backward"):
                pass
    if is_update:
        with watch.phase("optimizer"):
            pass
    if passes > 1:
        worker.note_flops(watch, _LENGTHS, is_training=is_update)
        watch.facts |= {"tokens": sum(_LENGTHS), "rows": len(_LENGTHS), "micro_batches": passes}
    return {"spans": {**watch.spans(), "rank": rank}}


def _sampled() -> dict[str, Any]:
    gauge = RolloutGauge(_SLOTS)
    for step in range(_DECODE_STEPS):
        gauge.observe(running=_SLOTS - step, waiting=0, kv_cache_use=0.5, tokens=_SLOTS * step, steps=1)
    facts = GenerationFacts()
    close_facts(facts, gauge, 1.0, OUTPUTS)
    return {"rows": len(OUTPUTS), **facts.span}


def worker_without_model() -> ModelWorker:
    """Who counts the operations of a model of the quick start's size."""
    config = load_config("quickstart")
    worker = ModelWorker(config.model, config.actor, config.seed, threads=1)
    worker.num_parameters, worker.shape = 540_000, (4, 128)
    return worker


def measure_step_cpu() -> list[Figure]:
    """CPU time a step, and as a share of a quick-start step."""
    context = HostContext(
        pool="main", run_id="telemetry", config=load_config("quickstart"), store=StoreView(BatchStore("main"))
    )
    with tempfile.TemporaryDirectory() as folder, use_host(context):
        file, worker = SpanFile(Path(folder) / SPANS_FILE), worker_without_model()
        one_step(0, file, worker)
        taken = []
        for number in range(1, _STEPS + 1):
            before = time.thread_time()
            one_step(number, file, worker)
            taken.append(time.thread_time() - before)
    median = statistics.median(taken)
    spread = f"{1e3 * min(taken):.2f} to {1e3 * max(taken):.2f} ms"
    return [
        Figure(
            name="telemetry_cpu_per_step",
            value=1e3 * median,
            unit="ms",
            target=1e3 * 0.005 * QUICK_START_STEP_SECONDS,
            note=spread,
        ),
        Figure(name="telemetry_share_of_step", value=100 * median / QUICK_START_STEP_SECONDS, unit="%", target=0.5),
    ]
