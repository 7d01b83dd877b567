"""Weight sync: the actor's weights become the engines' weights, as a new policy version, checked.

The caller holds two worker groups and passes references between them; no tensor comes to its process. Checked per
version: every received tensor's checksum, the set of names, that every weight of the engine got a value, and that actor
and engine give one probe sequence the same log-probs.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from configs.rollout import RolloutConfig
from resources.failures import WorkerFailed, choose_root
from resources.weight_channel import WeightChannelError
from resources.weight_receiver import BucketRef
from resources.weight_sender import probe_tokens

Way = Literal["in_process", "object_store", "process_group"]

PROBE_TOKENS = 16
PROBE_TOLERANCE = {"float32": 4e-4, "bfloat16": 0.02}
"""Largest mean difference of log-probs per token, as a share of 1 + their mean size.

Rounding grows with the logits: a real model finds the probe's tokens unlikely (log-probs of -12), and in bfloat16 its
two sides then differ by 0.13. A head left behind moves a tiny model's (log-probs of -5) by 0.2 and more."""


STORE_BUCKET_BYTES = 64 * 2**20
"""Through shared memory smaller buckets are faster: the engine starts sooner, and mapped pages are used again."""


class WeightSyncError(RuntimeError):
    """The engines do not sample as the actor does after a sync."""


class Pending(Protocol):
    """A call on its way."""

    def result(self) -> Any: ...


class Group(Protocol):
    """What is used of a WorkerGroup."""

    @property
    def world_size(self) -> int: ...

    @property
    def ranks(self) -> list[dict[str, Any]]: ...

    def submit(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Pending: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What a sync did."""

    version: int
    way: Way
    num_weights: int
    num_bytes: int
    seconds: float
    load_seconds: float
    """Longest time an engine spent from opening to the weights in force."""
    probe_gap: float | None
    """Largest mean difference of log-probs between actor and an engine; None for engines without a model."""


def sync_weights(
    actor: Group,
    rollout: Group,
    version: int,
    config: RolloutConfig,
    *,
    vocab_size: int,
    wire_dtype: str,
    compute_dtype: str = "float32",
    max_probe_tokens: int = PROBE_TOKENS,
    timeout: float = 600.0,
) -> SyncReport:
    """Make the actor's weights version `version` of the engines.

    Args:
        actor: group of a worker with `SendsWeights`.
        rollout: group of a worker with `ReceivesWeights`.
        version: policy version the engines hold afterwards.
        config: `weight_sync` and `bucket_bytes` are read.
        vocab_size: of the model; makes the probe sequence.
        wire_dtype: of the tensors on the way and of the engines' weights.
        compute_dtype: of the actor's arithmetic; the coarser of the two decides how far the probe may differ.
        max_probe_tokens: what the engines' longest sequence leaves for the probe.
        timeout: of each call, in seconds.

    Raises:
        WeightSyncError: when the probe differs. WeightMismatchError arrives as the workers' failure.
    """
    started = time.monotonic()
    way = choose_way(config.weight_sync, actor, rollout)
    probe = probe_tokens(vocab_size, min(PROBE_TOKENS, max_probe_tokens))
    sync = {"in_process": _in_process, "object_store": _object_store, "process_group": _process_group}[way]
    reports, actor_probe = sync(actor, rollout, version, config.bucket_bytes, wire_dtype, probe, timeout)
    dtype = "bfloat16" if "bfloat16" in (wire_dtype, compute_dtype) else "float32"
    gap = check_probe([report["probe"] for report in reports], actor_probe, PROBE_TOLERANCE[dtype])
    return SyncReport(
        version=version,
        way=way,
        num_weights=reports[0]["num_weights"],
        num_bytes=reports[0]["num_bytes"],
        seconds=time.monotonic() - started,
        load_seconds=max(report["seconds"] for report in reports),
        probe_gap=gap,
    )


def choose_way(asked: str, actor: Group, rollout: Group) -> Way:
    """`auto`: in one process without a copy; on one node through shared memory; otherwise by broadcast."""
    if asked != "auto":
        return asked  # type: ignore[return-value] - the config allows no other word
    places = [[(rank["node_id"], rank["pid"]) for rank in group.ranks] for group in (actor, rollout)]
    if places[0] == places[1]:
        return "in_process"
    return "object_store" if len({node for place in places for node, _ in place}) == 1 else "process_group"


def check_probe(engines: Sequence[Sequence[float]], actor: Sequence[float], tolerance: float) -> float | None:
    """Largest mean gap of log-probs between an engine and the actor.

    Raises WeightSyncError beyond `tolerance`, a share of 1 + the mean size of the actor's log-probs.
    """
    count = max(1, len(actor) - 1)  # nothing is said of the first token
    allowed = tolerance * (1.0 + sum(map(abs, actor)) / count)
    gaps: list[float] = []
    for rank, engine in enumerate(engines):
        if not engine:
            continue
        gap = sum(abs(a - b) for a, b in zip(engine, actor, strict=True)) / count
        # Not "gap > allowed": a nan must fail too.
        if not gap <= allowed:
            raise WeightSyncError(
                f"after the sync engine {rank} and the actor differ by {gap:.4g} in the log-prob of a probe token "
                f"(allowed: {allowed:.4g}); some weight did not arrive where it belongs, or the models differ"
            )
        gaps.append(gap)
    return max(gaps, default=None) if gaps else None


Synced = tuple[list[dict[str, Any]], Sequence[float]]


def _in_process(
    actor: Group, rollout: Group, version: int, bucket_bytes: int, dtype: str, probe: Sequence[int], timeout: float
) -> Synced:
    reports = rollout.submit("receive_from_sibling", version, bucket_bytes, dtype, probe, timeout=timeout).result()
    return reports, reports[0]["actor_probe"]


def _object_store(
    actor: Group, rollout: Group, version: int, bucket_bytes: int, dtype: str, probe: Sequence[int], timeout: float
) -> Synced:
    """The actor makes buckets ahead while the engines load: as many are alive as `bucket_bytes` holds, two at least."""
    opened = rollout.submit("begin_weights", timeout=timeout)
    size = min(bucket_bytes, STORE_BUCKET_BYTES)
    alive = max(2, bucket_bytes // size)
    most_loading = max(1, alive - 2)
    names = actor.submit("begin_weight_export", size, dtype, timeout=timeout).result()[0]
    coming: deque[Pending] = deque()
    loading: deque[Pending] = deque([opened])
    is_done, sent = False, 0
    try:
        while True:
            while not coming or len(coming) + len(loading) < alive:
                coming.append(actor.submit("next_weight_bucket", timeout=timeout))
            status, data = coming.popleft().result()[0]
            if not status["entries"]:
                break
            if len(loading) == most_loading:
                loading.popleft().result()
            loading.append(rollout.submit("load_weight_bucket", status["entries"], BucketRef(data), timeout=timeout))
            sent += status["num_bytes"]
            del data
        # The actor is idle by now, while the engines still load the last buckets.
        scored = actor.submit("probe_weights", probe, timeout=timeout)
        for pending in (*coming, *loading):
            pending.result()
        is_done = True
    finally:
        if not is_done:
            actor.submit("end_weight_export", timeout=timeout)
    reports = rollout.submit("finish_weights", version, names, probe, timeout=timeout).result()
    return [{**report, "num_bytes": sent} for report in reports], scored.result()[0]


def _process_group(
    actor: Group, rollout: Group, version: int, bucket_bytes: int, dtype: str, probe: Sequence[int], timeout: float
) -> Synced:
    """A channel is made for each sync: it costs milliseconds, and no group outlives a restart of either side."""
    receivers = rollout.world_size
    node_ip = str(actor.ranks[0]["node"])
    host, port = actor.submit("host_weight_channel", node_ip, receivers, timeout, timeout=timeout).result()
    joining = rollout.submit("join_weight_channel", host, port, receivers, timeout, timeout=timeout)
    _both(actor.submit("join_weight_channel", host, port, receivers, timeout, timeout=timeout), joining)
    names = actor.submit("weight_names", timeout=timeout).result()[0]
    receiving = rollout.submit("receive_weight_broadcast", version, names, probe, timeout=timeout)
    sending = actor.submit("broadcast_weights", bucket_bytes, dtype, timeout=timeout)
    (sent, *_), reports = _both(sending, receiving)
    scored = actor.submit("probe_weights", probe, timeout=timeout).result()[0]
    return [{**report, "num_bytes": sent} for report in reports], scored


def _both(*calls: Pending) -> list[Any]:
    """The answers of calls that meet in a channel; each call has a deadline of its own, which bounds the wait for it.

    Raises WorkerFailed: the cause, with a failure that followed from it as its own cause. An end that fails lets go of
    the channel, which the other end may hear of before the first has told its error.
    """
    answers: list[Any] = []
    failed: list[WorkerFailed] = []
    for call in calls:
        try:
            answers.append(call.result())
        except WorkerFailed as error:
            failed.append(error)
    if not failed:
        return answers
    told = [one.failure for one in failed if one.failure.exception_type != WeightChannelError.__name__]
    root = choose_root(told or [one.failure for one in failed])
    cause = next(one for one in failed if one.failure is root)
    raise cause from next((one for one in failed if one is not cause), None)
