"""The cast: which worker class plays each role, with which arguments, and the worker groups made of them.

The two tables of the design meet here. Role -> worker class is `WORKERS` (or `roles.<role>.worker`, an import path of
the user's own); role -> pool comes from the config through `configs.layout.process_groups`, so that what was checked
and printed by the plan is what is started.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.layout import HYBRID_ROLES, ProcessGroup, process_groups
from configs.model import ModelConfig
from configs.pools import RoleConfig, RoleName
from configs.run import RunConfig
from resources.cluster import Cluster
from resources.placement_groups import PoolError
from resources.pools import ResourcePool
from resources.processes import WorkerSpec
from resources.ranks import Mesh
from resources.tensor_peers import peers_apart
from resources.worker_group import WorkerGroup, start_group, start_groups

WORKERS: dict[str, str] = {
    "actor": "resources.workers.actor:ActorWorker",
    "critic": "resources.workers.critic:CriticWorker",
    "reference": "resources.workers.reference:ReferenceWorker",
    "rollout": "resources.workers.rollout:RolloutWorker",
    "reward": "resources.workers.reward:RewardWorker",
    "teacher": "resources.workers.teacher:TeacherWorker",
    "env": "resources.workers.env:EnvWorker",
    "advantage": "resources.workers.compute:ComputeWorker",
    "reward_model": "resources.workers.reward_model:RewardModelWorker",
    "judge": "resources.workers.judge:JudgeWorker",
    "demonstrations": "resources.workers.demonstrations:DemonstrationWorker",
    "preferences": "resources.workers.preferences:PreferenceWorker",
    "reward_trainer": "resources.workers.reward_trainer:RewardTrainerWorker",
}
"""Role -> the class that plays it unless the config names another."""


def stateful_duties(config: RunConfig) -> tuple[str, ...]:
    """Roles whose state is saved, restored and compared bit by bit; the reference where it changes."""
    refreshed = ("reference",) if config.algorithm.kl.refresh_every is not None else ()
    return ("actor", "critic", *refreshed)


@dataclass(frozen=True, kw_only=True)
class Casting:
    """What the workers are made from, beside the config."""

    config: RunConfig
    model: ModelConfig
    """The policy's start: the config's model, or what the warm-up made of it."""
    graders: tuple[Any, ...] = ()
    """Values built on the task side; workers know no grader by name."""
    call_seconds: float = 1800.0
    extra: Mapping[str, Any] = field(default_factory=dict)


Arguments = Callable[[Casting, ProcessGroup, RoleConfig], dict[str, Any]]
"""Of the config's role that does the duty: fused roles share processes, and each is cut as its own entry says."""


def _trained(settings: str) -> Arguments:
    def arguments(cast: Casting, group: ProcessGroup, role: RoleConfig) -> dict[str, Any]:
        return {
            "args": (cast.model, getattr(cast.config, settings), cast.config.seed),
            "kwargs": {
                "threads": group.threads,
                "tensor_parallel": role.tensor_parallel,
                "sequence_parallel": role.sequence_parallel,
            },
        }

    return arguments


def _rollout(cast: Casting, group: ProcessGroup, role: RoleConfig) -> dict[str, Any]:
    replica = {"replica": int(group.part)} if group.part else {}
    return {
        "args": (cast.config.rollout, cast.model, cast.config.data, cast.config.seed),
        "kwargs": {
            "threads": group.threads,
            "tensor_parallel": role.tensor_parallel,
            "validation": cast.config.validation,
            **replica,
        },
    }


def _reward(cast: Casting, group: ProcessGroup, role: RoleConfig) -> dict[str, Any]:
    return {"args": (cast.config.reward, tokenizer_folder(cast), cast.graders)}


def _teacher(cast: Casting, group: ProcessGroup, role: RoleConfig) -> dict[str, Any]:
    teacher = next(teacher for teacher in cast.config.teachers if teacher.name == group.part)
    kwargs = {"student": cast.model, "threads": group.threads, "tensor_parallel": role.tensor_parallel}
    return {"args": (teacher.model, cast.config.actor, cast.config.seed), "kwargs": kwargs}


def _env(cast: Casting, group: ProcessGroup, role: RoleConfig) -> dict[str, Any]:
    tools = cast.config.rollout.tools
    path = tools.environment if tools is not None else None
    if tools is None or path is None:
        raise ValueError("roles.env is cast and rollout.tools.environment is not set")
    return {"args": (path, tools.environment_options, tools.timeout_seconds)}


def _demonstrations(cast: Casting, group: ProcessGroup, role: RoleConfig) -> dict[str, Any]:
    config = cast.config
    turns = config.sft.turns if config.sft is not None else ()
    return {"args": (cast.model, config.data, config.rollout, turns)}


def _reward_model(cast: Casting, group: ProcessGroup, duty: str) -> dict[str, Any]:
    """Of `reward_model.NAME`: the model of the grader NAME."""
    models = {grader.name: grader.model for grader in cast.config.reward.graders}
    return {
        "args": (models[duty.partition(".")[2]], cast.config.actor, cast.config.seed),
        "kwargs": {"threads": group.threads},
    }


def _judge(cast: Casting, group: ProcessGroup, duty: str) -> dict[str, Any]:
    """Of `judge.NAME`: the model that grader NAME serves."""
    name = duty.partition(".")[2]
    judge = next(grader.judge for grader in cast.config.reward.graders if grader.name == name)
    if judge is None or judge.serve is None:
        raise ValueError(f"grader {name!r} serves no judge")
    rollout = cast.config.rollout.model_copy(
        update={"engine": judge.engine, "scripted": None, "tools": None, "num_gpu_blocks_override": None}
    )
    kwargs = {"max_model_length": judge.max_model_length, "threads": group.threads}
    return {"args": (name, judge.serve, rollout, cast.config.seed), "kwargs": kwargs}


def tokenizer_folder(cast: Casting) -> str:
    """A folder with the policy's tokenizer; one is made for a model that is built or unpacked here."""
    model = cast.model
    if model.tokenizer_path is not None:
        return model.tokenizer_path
    if model.path is not None and model.gguf_file is None and Path(model.path).is_dir():
        return model.path
    from resources.models.causal_lm import prepare_model_folder  # needs torch, which a plain folder does not

    return str(prepare_model_folder(model, cast.config.seed))


ARGUMENTS: dict[str, Arguments] = {
    "actor": _trained("actor"),
    "critic": _trained("critic"),
    "reference": _trained("actor"),
    "rollout": _rollout,
    "reward": _reward,
    "teacher": _teacher,
    "advantage": lambda cast, group, role: {"kwargs": {"threads": group.threads}},
    "env": _env,
    "demonstrations": _demonstrations,
    "preferences": lambda cast, group, role: {"args": (cast.model, cast.config.data, cast.config.rollout)},
    "reward_trainer": _trained("actor"),
}
"""Role -> constructor arguments of its workers."""

OF_GRADERS: dict[str, Callable[[Casting, ProcessGroup, str], dict[str, Any]]] = {
    "reward_model": _reward_model,
    "judge": _judge,
}
"""Models of graders, which sit in the processes of the reward workers."""

HOSTS = {
    "reward_model": "reward",
    "judge": "reward",
    "demonstrations": "actor",
    "preferences": "actor",
    "reward_trainer": "actor",
}
"""What the config has no role for -> the duty in whose processes it sits."""

NEEDS_NO_RENDEZVOUS = ("reward", "advantage", "env")


def duties_of(group: ProcessGroup) -> list[str]:
    """Duties of a group's processes, hybrids unfolded, the actor before those that read from it."""
    if group.part:
        return [f"{role}.{group.part}" for role in group.roles]
    return [duty for role in group.roles for duty in HYBRID_ROLES.get(role, (role,))]


def all_duties(config: RunConfig, group: ProcessGroup) -> list[str]:
    """`duties_of`, and the models of graders: they sit in the processes of the reward workers."""
    models = [f"reward_model.{grader.name}" for grader in config.reward.graders if grader.kind == "model"]
    judges = [f"judge.{grader.name}" for grader in config.reward.graders if grader.serves_judge]
    return [*duties_of(group), *([*models, *judges] if "reward" in group.roles else [])]


def cast_groups(cluster: Cluster, casting: Casting) -> dict[str, WorkerGroup]:
    """Start every worker group of the config; duty -> group. If one does not start, none stays."""
    started: dict[str, WorkerGroup] = {}
    is_complete = False
    try:
        for group in process_groups(casting.config):
            started |= start_process_group(cluster, casting, group)
        is_complete = True
    finally:
        if not is_complete:
            for group in distinct_groups(started):
                group.shutdown()
    return started


def distinct_groups(groups: Mapping[str, WorkerGroup]) -> list[WorkerGroup]:
    """One group per set of processes: fused roles start, restart and end together."""
    return list({id(group.processes): group for group in groups.values()}.values())


def start_process_group(
    cluster: Cluster, casting: Casting, group: ProcessGroup, duties: list[str] | None = None
) -> dict[str, WorkerGroup]:
    """Start the processes of one group of the plan.

    Raises WorkerFailed, and PoolError where tensor-parallel peers would lie on two nodes.
    """
    pool = cluster.pools[group.pool]
    check_peers(casting.config, pool, group)
    chosen = duties or all_duties(casting.config, group)
    specs = [worker_spec(casting, group, duty, is_first=duty == chosen[0]) for duty in chosen]
    if len(specs) == 1:
        return {specs[0].role: start_group(cluster, pool, specs[0], bundles=group.bundles)}
    return start_groups(cluster, pool, specs, "fused", bundles=group.bundles)


def check_peers(config: RunConfig, pool: ResourcePool, group: ProcessGroup) -> None:
    """Raises PoolError where Ray put bundles so that tensor-parallel peers would lie on two nodes."""
    problem = peers_apart(config, group, pool.ranks(group.bundles))
    if problem is not None:
        raise PoolError(f"pool {pool.name}: {problem}")


def worker_spec(casting: Casting, group: ProcessGroup, duty: str, *, is_first: bool = True) -> WorkerSpec:
    """How the workers of `duty` are made; `teacher.NAME` is the duty of one teacher.

    Only one of several fused roles, the one that `is_first`, claims the share of their process.
    """
    kind = duty.partition(".")[0]
    roles: dict[str, RoleName] = {done: role for role in group.roles for done in HYBRID_ROLES.get(role, (role,))}
    # An advantage worker may be in no role of the config.
    placed = casting.config.roles.get(roles[HOSTS.get(kind, kind)]) or RoleConfig(pool=group.pool)
    pool = casting.config.pools[group.pool]
    own = placed.worker if kind not in HOSTS else None
    if kind in OF_GRADERS:
        arguments = OF_GRADERS[kind](casting, group, duty)
    else:
        arguments = ARGUMENTS[kind](casting, group, placed)
    return WorkerSpec(
        role=duty,
        worker=own or WORKERS[kind],
        **arguments,
        fraction=(group.accelerators / pool.accelerators_per_bundle if is_first else 0.0),
        cpus=group.cpus if is_first else 0.0,
        threads=group.threads,
        env=dict(placed.env),
        mesh=Mesh(tp=placed.tensor_parallel, sp=placed.sequence_parallel),
        rendezvous=duty not in NEEDS_NO_RENDEZVOUS,
        call_seconds=casting.config.recovery.call_deadline_seconds,
    )
