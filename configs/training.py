"""How the trained roles do their steps, and what the run keeps."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema, model_validator

from configs.base import Config, Count, Folder, Items, Name, Seconds, Strings
from configs.model import ModelConfig, OptimizerConfig
from configs.pools import Bytes, bytes_schema

LEAST_OBJECT_STORE_BYTES = 80_000_000
"""Ray takes no less than 75 MiB."""


class TrainedRoleConfig(Config):
    """The actor's or the critic's optimizer step."""

    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_size: Count = 8
    """Sequences in one forward, when `micro_batch_tokens` is not given."""
    micro_batch_tokens: Count | None = None
    """Token budget of one forward; sequences are balanced by length across ranks."""
    log_prob_chunk_tokens: Count = 1024
    """Tokens whose logits exist at one time: [B, T, vocabulary] is never held whole."""
    log_prob_micro_batch_size: Count | None = None
    """Sequences in one forward without gradients; `micro_batch_size` when left out."""
    fsdp: bool = True
    """Shard weights over the data-parallel ranks (FSDP2) when there is more than one."""
    offload: bool = False
    """Keep weights and optimizer state in host memory while another role of the bundle works."""


class CriticConfig(TrainedRoleConfig):
    """The value model; the actor's architecture and start unless `model` says otherwise."""

    model: ModelConfig | None = None
    from_reward_model: bool = False
    """Start trunk and head from the reward model at `model`."""


class TeacherConfig(Config):
    """One teacher of a distillation."""

    name: Name
    model: ModelConfig
    sources: Strings = ()
    """Data sources routed to it; all when empty."""
    workers: Count | None = None
    """Workers of this teacher, of the teacher role's; an equal share when left out."""


class DistillationConfig(Config):
    """On-policy distillation: teachers score what the student sampled."""

    objective: Literal["reverse_kl_loss", "reverse_kl_reward", "forward_kl_top_k"] = "reverse_kl_reward"
    """What the teacher's log-probs become: a reward of each token, a term of the loss, or a target distribution."""
    top_k: Count = 32
    """Likeliest tokens of the teacher that `forward_kl_top_k` compares one by one; the rest is one cell."""
    coef: Annotated[float, Field(gt=0.0)] = 1.0
    """Weight of the teacher's part."""
    task_reward_weight: Annotated[float, Field(ge=0.0)] | None = None
    """Weight of the task's advantages; 0 for algorithm `distillation` and 1 for all others when left out."""


class SftConfig(Config):
    """A short supervised warm-up before PPO (flows/sft.py)."""

    steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Count = 64
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    turns: Strings = ()
    """Turns of a demonstration as texts with {prompt} and {answer}, for example ["[calculate({prompt})]", "{answer}"]:
    the tools of rollout.tools answer between them. The answer alone when left out."""
    objective: Literal["causal_lm", "reward_model"] = "causal_lm"
    """`reward_model` trains a scalar head from preference pairs."""

    @property
    def learns_answers(self) -> bool:
        """Whether a policy is fitted to the rows' own answers."""
        return self.objective == "causal_lm" and self.steps > 0 and hold_answers(self.turns)

    @property
    def warms_up(self) -> bool:
        """Whether a run begins with it: a reward model is fitted by `callsheet sft`, not before PPO."""
        return self.steps > 0 and self.objective == "causal_lm"

    @model_validator(mode="after")
    def _turns_can_be_filled_in(self) -> "SftConfig":
        for number, turn in enumerate(self.turns):
            try:
                turn.format(prompt="", answer="")
            except (AttributeError, IndexError, KeyError, ValueError):
                raise ValueError(
                    f"turns.{number} is {turn!r}; {{prompt}} and {{answer}} are filled in, nothing else; write a brace "
                    "that is meant as one twice"
                ) from None
        return self


def hold_answers(turns: Sequence[str]) -> bool:
    """Whether demonstrations of these turns hold the answers of their rows; without turns they are the answers.

    >>> hold_answers(()), hold_answers(["[calculate({prompt})]", "{answer}"]), hold_answers(["ask {prompt}"])
    (True, True, False)
    """
    return not turns or any(turn.format(prompt="", answer="x") != turn.format(prompt="", answer="") for turn in turns)


class RecoveryConfig(Config):
    """What happens when a process dies."""

    enabled: bool = True
    snapshot_every: Count = 1
    """Iterations between snapshots in memory; bounds what is replayed."""
    max_recoveries: Annotated[int, Field(ge=0)] = 8
    """In the whole run; then it stops, resumable."""
    backoff_seconds: Annotated[float, Field(ge=0.0)] = 1.0
    allow_smaller: bool = False
    """Go on with fewer ranks when no spare is left."""
    call_deadline_seconds: Annotated[Seconds, Field(ge=1.0)] = 1800.0
    """Longest a worker call may take."""
    stopped_after_seconds: Annotated[Seconds, Field(ge=2.0)] = 10.0
    """Without a heartbeat (one a second) and without CPU time gained, a worker counts as stopped."""
    on_nan_loss: Literal["skip", "stop"] = "skip"
    max_nan_steps: Count = 10
    prefect_outage_seconds: Seconds = 300.0
    """How long the run waits for a Prefect server that went away."""


class CheckpointConfig(Config):
    """What is written to disk and kept."""

    every: Annotated[int, Field(ge=0)] = 10
    """Iterations between full checkpoints; 0 writes only the last one."""
    keep: Annotated[int, Field(ge=-1)] = 2
    """Newest ones kept; -1 keeps all, 0 is refused."""
    keep_best: str | None = None
    """Metric whose best checkpoint is kept besides."""
    asynchronous: bool = True

    def is_due(self, done: int, iterations: int) -> bool:
        """Whether a checkpoint follows after `done` of `iterations`; after the last one it always does.

        >>> [done for done in range(1, 8) if CheckpointConfig(every=3).is_due(done, 7)]
        [3, 6, 7]
        """
        return done == iterations or (self.every > 0 and done % self.every == 0)

    def model_post_init(self, _context: object, /) -> None:
        """0 would delete the only good checkpoint."""
        if self.keep == 0:
            raise ValueError("keep is 0, which would delete the only checkpoint; use -1 to keep all, or at least 1")


class TelemetryConfig(Config):
    """What is measured and where it shows."""

    enabled: bool = True
    """Whether iterations are judged and their spans kept in spans.jsonl; `callsheet report` and `whatif` need them."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Loopback port of a Prometheus endpoint; none when left out."""
    sinks: Items[Literal["tensorboard", "wandb", "mlflow"]] = ()
    """Of `tensorboard`, `wandb`, `mlflow`."""
    samples_per_iteration: Annotated[int, Field(ge=0)] = 16
    """Rows kept token by token in samples/ and shown in the UI, beside all rows with their text; 0 keeps none."""


class CodeConfig(Config):
    """How your code is found; every node has the same install of ours."""

    import_paths: Items[Folder] = ()
    """Folders put on sys.path of every process, for user graders, losses and data; the same on every node."""


class PrefectConfig(Config):
    """The Prefect server."""

    api_url: str | None = None
    """A running server; what PREFECT_API_URL or the active Prefect profile names when left out. Without any of them an
    embedded server on SQLite is started on loopback."""
    home: str | None = None
    """Where the embedded server keeps its database; `~/.callsheet/prefect` when left out."""
    start_timeout_seconds: Seconds = 120.0
    prune_after_iterations: Count = 200
    """Older iteration subflows lose their task rows beyond this many, which keeps UI and database usable."""


class RayConfig(Config):
    """The Ray cluster."""

    address: str | None = None
    """HOST:PORT of a running cluster; without one a local cluster is started."""
    num_cpus: Count | None = None
    """Logical CPUs of a local cluster; what the plan needs, at least the machine's, when left out."""
    num_gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs of a local cluster; those that the machine has when left out, none with 0."""
    object_store_bytes: Annotated[
        Bytes, Field(ge=LEAST_OBJECT_STORE_BYTES), WithJsonSchema(bytes_schema(LEAST_OBJECT_STORE_BYTES))
    ] = 512 * 2**20
    """Shared memory for the objects of a local cluster."""
    placement_deadline_seconds: Seconds = 120.0
    connect_deadline_seconds: Seconds = 20.0
