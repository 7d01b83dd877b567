"""What to change for each cause, in the words of the config, and the evidence as a sentence."""

from collections.abc import Collection, Mapping

from resources.telemetry.causes import Cause

Evidence = Mapping[str, float | str]

_CHANGES: dict[Cause, str] = {
    Cause.SLOW_GRADER: (
        "raise reward.processes{reward_workers}, or make grader {name} cheaper; reward.stream: true "
        "hides grading under the rollout"
    ),
    Cause.RARE_SLOW_GRADER: (
        "lower timeout_seconds of grader {name} towards its usual latency (on_failure says what such a row "
        "becomes){ahead_hides}"
    ),
    Cause.SLOW_REWARD_MODEL: (
        "give roles.reward a pool of its own with more bundles; reward.stream: true hides scoring under the rollout"
    ),
    Cause.SLOW_JUDGE: ("raise {concurrency} of grader {name}, keep reward.stream: true{ahead_hides}"),
    Cause.SLOW_SANDBOX: ("raise reward.processes{reward_workers} for grader {name}, or lower its timeout_seconds"),
    Cause.LONG_TAIL: (
        "{ahead_trains}lower rollout.max_response_length (algorithm.overlong shapes the reward towards it; its "
        "max_length goes down too){fewer_engines}"
    ),
    Cause.KV_CACHE: (
        "raise rollout.kv_cache_bytes (CPU) or rollout.gpu_memory_fraction (GPU), drop "
        "rollout.num_gpu_blocks_override, or lower rollout.max_running_sequences to what fits"
    ),
    Cause.SLOW_RANK: (
        "look at rank {rank:.0f} of roles.{role} on node {node} (callsheet doctor: load, clocks, neighbours) "
        "or take its node out of the pool"
    ),
    Cause.UNEVEN_TOKENS: "{even_tokens}",
    Cause.HEAVY_CRITIC: ("give roles.critic a larger pool of its own, or a smaller critic.model{no_critic}"),
    Cause.SLOW_REFERENCE: ("{reference_to_the_actor}give its pool more bundles{no_reference}"),
    Cause.SERIALISE: (
        "keep the batch in the object store: pass batch handles, not tensors, through the flow ({bytes_text} "
        "were serialised); a larger group needs dispatch by reference"
    ),
    Cause.COLLECT: "let workers return references (bulk methods) instead of data ({bytes_text} were collected)",
    Cause.SCHEDULING: (
        "raise data.prompts_per_iteration so that {tasks:.0f} tasks' overhead weighs less{running_server}{fuse}, "
        "or take snapshots more rarely "
        "(recovery.snapshot_every)"
    ),
    Cause.FETCH: (
        "put the pools of {task} and of its inputs on the same nodes, so that rows are read from shared memory"
    ),
    Cause.COMMUNICATION: (
        "fewer ranks with larger micro-batches ({section}.micro_batch_size), or the pool on one node "
        "(pools.*.strategy: PACK); a model that fits one rank needs no {section}.fsdp"
    ),
    Cause.WEIGHT_SYNC: (
        "{process_group}{fuse_for_sync}larger rollout.bucket_bytes; rollout.dtype: bfloat16 halves the bytes"
    ),
    Cause.SHARED_POOL: "give roles.{role} a pool of its own: it queues behind {behind} in pool {pool}",
    Cause.HANGING_TASK: "raise checkpoint.every or validation.every, or keep checkpoint.asynchronous: true ({task})",
    Cause.COMPUTE_BOUND: (
        "give pool {pool} twice the bundles: {role} computes for {path_percent:.0f} % of the critical path"
    ),
    Cause.BALANCED: "nothing stands out; a faster step needs more of everything{or_ahead}",
}

_ROLLOUT_COMPUTE = (
    "; or raise {tensor_parallel}rollout.max_running_sequences, or capture graphs (rollout.enforce_eager: false)"
)
_TRAINING_COMPUTE = "; or raise {role}.micro_batch_size{fewer_epochs}"

_AHEAD_APART = "roles.rollout on a pool of its own (colocate: shared) with async_depth: 1"
_AHEAD_SPLIT = (
    "roles.rollout (a role of its own in place of a hybrid one) on a pool of its own (colocate: shared) with "
    "rollout.weight_sync: auto and async_depth: 1"
)

_EVIDENCE: dict[Cause, str] = {
    Cause.SLOW_GRADER: "{exposed_seconds:.2f} s of grading stand behind the rollout",
    Cause.RARE_SLOW_GRADER: (
        "{slow_calls:.0f} of {calls:.0f} calls were slow: up to {max_seconds:.2f} s against a median of "
        "{p50_seconds:.3f} s; {exposed_seconds:.2f} s stand behind the rollout"
    ),
    Cause.LONG_TAIL: (
        "{tail_seconds:.2f} s ({tail_percent:.0f} % of the rollout) with fewer than a quarter of the slots busy"
    ),
    Cause.KV_CACHE: (
        "{preemptions:.0f} preemptions, KV cache {kv_percent:.0f} % full, {starved_seconds:.2f} s of slots "
        "left empty while sequences waited"
    ),
    Cause.SLOW_RANK: (
        "rank {rank:.0f} on node {node} worked {slowest_seconds:.2f} s where the median worked {median_seconds:.2f} s"
    ),
    Cause.UNEVEN_TOKENS: (
        "rank {rank:.0f} worked {slowest_seconds:.2f} s against {median_seconds:.2f} s because it had that "
        "many more tokens"
    ),
    Cause.HEAVY_CRITIC: "critic tasks took {seconds:.2f} s, {ratio:.1f} times the actor's {actor_seconds:.2f} s",
    Cause.SLOW_REFERENCE: (
        "reference took {seconds:.2f} s, {ratio:.1f} times the actor's {against} ({actor_seconds:.2f} s) on "
        "the same tokens"
    ),
    Cause.SERIALISE: "{serialise_seconds:.2f} s of serialising {bytes_text}",
    Cause.COLLECT: "{collect_seconds:.2f} s of collecting {bytes_text}",
    Cause.SCHEDULING: (
        "{scheduling_seconds:.2f} s in which all inputs were there and nothing ran: {between_seconds:.2f} s between "
        "iterations (commit, snapshot, Prefect), the rest between {tasks:.0f} tasks"
    ),
    Cause.FETCH: "{fetch_seconds:.2f} s of fetching rows, most of it by {task}",
    Cause.COMMUNICATION: "{communication_seconds:.2f} s of {execute_seconds:.2f} s in collectives on every rank",
    Cause.WEIGHT_SYNC: "{seconds:.2f} s to move {bytes_text} of weights",
    Cause.SHARED_POOL: "{queued_seconds:.2f} s in the queue behind {behind}",
    Cause.HANGING_TASK: "{task} took {seconds:.2f} s on the critical path",
    Cause.COMPUTE_BOUND: "{path_percent:.0f} % of the critical path",
    Cause.BALANCED: "no single change would save as much as {threshold_percent:.0f} % of the step",
}
_GRADER_EVIDENCE = "{exposed_seconds:.2f} s of grading stand behind the rollout"
_GRADER_DETAIL = (
    " ({name}, {kind}: {calls:.0f} calls, median {p50_seconds:.3f} s, p95 {p95_seconds:.3f} s, longest "
    "{max_seconds:.2f} s)"
)


def change_for(role: str, cause: Cause, evidence: Evidence, refused: Collection[str] = ()) -> str:
    """The change to make, in the words of the config; `refused` are changes that this run's config would not take."""
    text = _CHANGES[cause]
    if cause is Cause.COMPUTE_BOUND:
        text += {"rollout": _ROLLOUT_COMPUTE, "actor": _TRAINING_COMPUTE, "critic": _TRAINING_COMPUTE}.get(role, "")
    words = _words(role, evidence)
    words.update(_options(role, evidence, refused))
    return text.format_map(words)


def _options(role: str, evidence: Evidence, refused: Collection[str]) -> dict[str, str]:
    """Parts of a recommendation, empty where the config would refuse them."""
    ahead = "async_depth: 1"
    if "ahead" in refused:
        ahead = "" if "ahead_apart" in refused else _AHEAD_SPLIT if "ahead_moved" in refused else _AHEAD_APART
    is_http = evidence.get("kind") == "http"
    section = role if role == "critic" else "actor"
    options = {
        "reward_workers": " or roles.reward.workers",
        "fewer_engines": ", or put roles.rollout on fewer engines",
        "no_critic": "; algorithm.name: grpo (with rollout.group_size of 2 or more) needs no critic",
        "no_reference": "; algorithm.kl.coef: 0 needs no reference",
        "reference_to_the_actor": "move roles.reference.pool to the actor's pool (colocate: shared), or ",
        "running_server": ", use a running server (prefect.api_url)",
        "fuse": ", fuse actor and rollout (colocate: fused)",
        "process_group": "rollout.weight_sync: process_group, ",
        "tensor_parallel": "roles.rollout.tensor_parallel, ",
        "fewer_epochs": ", or lower algorithm.num_ppo_epochs",
    }
    found = {name: "" if name in refused else text for name, text in options.items()}
    return found | {
        "fuse_for_sync": "" if "fuse" in refused else "fuse actor and rollout (weight_sync: in_process), ",
        "ahead_hides": f"; {ahead} hides what is left" if ahead else "",
        "ahead_trains": f"{ahead} trains while the tail decodes; or " if ahead else "",
        "or_ahead": f", or {ahead}" if ahead else "",
        "concurrency": "options.max_concurrency" if is_http else "judge.max_concurrency (and requests_per_minute)",
        "section": section,
        "even_tokens": "raise data.prompts_per_iteration, so that long and short prompts even out over the engines"
        if role == "rollout"
        else f"set {section}.micro_batch_tokens so that ranks get equal tokens rather than equal rows",
    }


def evidence_for(role: str, cause: Cause, evidence: Evidence) -> str:
    """The evidence in numbers, as a sentence."""
    text = _EVIDENCE.get(cause, _GRADER_EVIDENCE)
    if text == _GRADER_EVIDENCE and "calls" in evidence:
        text += _GRADER_DETAIL
    if cause is Cause.LONG_TAIL and "longest_response" in evidence:
        text += "; the longest response has {longest_response:.0f} tokens, the typical one {typical_response:.0f}"
    return text.format_map(_words(role, evidence))


class _Words(dict[str, float | str]):
    """Format values; one that this run did not measure reads as a question mark, numbers as nan."""

    def __missing__(self, key: str) -> "_Unmeasured":
        return _Unmeasured()


class _Unmeasured(str):
    def __new__(cls) -> "_Unmeasured":
        return super().__new__(cls, "?")

    def __format__(self, spec: str) -> str:
        return "?"


def _words(role: str, evidence: Evidence) -> _Words:
    words = _Words(evidence)
    words["role"] = role
    for percent, fraction in (
        ("path_percent", "path_share"),
        ("tail_percent", "tail_fraction"),
        ("kv_percent", "kv_cache_use_max"),
        ("threshold_percent", "threshold"),
    ):
        if isinstance(value := evidence.get(fraction), int | float):
            words[percent] = 100.0 * value
    if isinstance(value := evidence.get("bytes"), int | float):
        words["bytes_text"] = bytes_text(value)
    if evidence.get("node") == "":
        words["node"] = "(unnamed)"
    return words


def bytes_text(value: float) -> str:
    """
    >>> bytes_text(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
