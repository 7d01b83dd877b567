"""Rules about roles, pools, and the shares of a bundle."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from configs.environment import PROTECTED_ENV_KEYS, is_secret_name
from configs.layout import (
    HYBRID_ROLES,
    ProcessGroup,
    active_roles,
    cut,
    duties,
    num_workers,
    process_groups,
    uses_accelerator,
)
from configs.pools import RoleName
from configs.problems import MISSING, Problem

if TYPE_CHECKING:
    from configs.run import RunConfig

_FULL = 1.0 + 1e-4
"""A bundle's shares may exceed the whole by rounding, never by more."""
_ONE_PER_PROCESS = ("cpus", "fraction", "threads")
_ENV_KEY = re.compile(r"^[^=\s\0]+\Z")


def roles_name_pools(config: "RunConfig") -> Iterator[Problem]:
    """Every role stands in a pool that exists."""
    for role, where in config.roles.items():
        if where.pool not in config.pools:
            yield Problem(
                f"roles.{role}.pool", where.pool, "there is no such pool", f"pools are {sorted(config.pools)}"
            )


def one_role_per_duty(config: "RunConfig") -> Iterator[Problem]:
    """`actor_rollout` beside `actor` would train twice."""
    count = Counter(duty for role in config.roles for duty in HYBRID_ROLES.get(role, (role,)))
    for duty, times in count.items():
        if times > 1:
            both = [role for role in config.roles if duty in HYBRID_ROLES.get(role, (role,))]
            yield Problem("roles", both, f"both do the duty {duty!r}", "name it once")


def needed_roles_are_there(config: "RunConfig") -> Iterator[Problem]:
    """The algorithm, the tools and the teachers each ask for roles."""
    needed = {
        "actor": "there is nothing to train without it",
        "rollout": "something must sample",
        "reward": "responses need scores",
    }
    if config.algorithm.needs_critic:
        needed["critic"] = f"algorithm {config.algorithm.name} learns values"
    if config.algorithm.needs_reference and config.model.lora is None:
        needed["reference"] = f"algorithm.kl.coef is {config.algorithm.kl.coef}"
    if config.teachers:
        needed["teacher"] = f"there are {len(config.teachers)} teachers"
    if config.rollout.tools is not None and config.rollout.tools.environment is not None:
        needed["env"] = f"rollout.tools.environment is {config.rollout.tools.environment!r}"
    present = duties(config)
    for duty, reason in needed.items():
        if duty not in present:
            yield Problem(f"roles.{duty}", MISSING, f"{reason}, which needs this role", f"add roles.{duty}.pool")


def accelerators_are_named(config: "RunConfig") -> Iterator[Problem]:
    """Ray's own counts of CPUs and memory are no accelerators, and its spelling GPU is not ours."""
    for name, pool in config.pools.items():
        path = f"pools.{name}.accelerator"
        if pool.accelerator.lower() in ("gpu", "npu", "none") and pool.accelerator != pool.accelerator.lower():
            yield Problem(path, pool.accelerator, "accelerators are written small", f"write {pool.accelerator.lower()}")
        elif pool.accelerator.lower() in ("cpu", "memory", "object_store_memory", ""):
            yield Problem(path, pool.accelerator, "that is no accelerator", "none, gpu, npu or a custom Ray resource")
        if pool.nodes is not None and pool.strategy != "PACK":
            way_out = "leave it out, or give bundles in place of nodes"
            yield Problem(f"pools.{name}.strategy", pool.strategy, "nodes already says where bundles go", way_out)


def pools_have_roles(config: "RunConfig") -> Iterator[Problem]:
    """A pool that nobody uses would reserve machines for nothing."""
    used = {group.pool for group in process_groups(config)}
    for name in sorted(set(config.pools) - used):
        idle = [role for role, where in config.roles.items() if where.pool == name]
        rule = f"algorithm {config.algorithm.name} does not need {idle}" if idle else "no role stands in it"
        yield Problem(f"pools.{name}", idle, rule, "remove the pool and its roles, or give it another role")


def extra_roles_have_work(config: "RunConfig") -> Iterator[Problem]:
    """A teacher without teachers, an environment role without environment, a reference that LoRA already gives."""
    if "teacher" in config.roles and not config.teachers:
        yield Problem("roles.teacher", "given", "teachers is empty", "name the teacher models, or remove the role")
    tools = config.rollout.tools
    if "env" in config.roles and (tools is None or tools.environment is None):
        rule = "rollout.tools.environment is not set"
        yield Problem("roles.env", "given", rule, "name the environment, or remove the role")
    if "reference" in config.roles and config.model.lora is not None:
        rule = "with model.lora the reference is the actor with its adapter off"
        yield Problem("roles.reference", "given", rule, "remove roles.reference")


def worker_counts_fit(config: "RunConfig") -> Iterator[Problem]:
    """Workers fill bundles evenly, and parallel peers fill whole sets."""
    for role in active_roles(config):
        where = config.roles[role]
        pool = config.pools[where.pool]
        workers = where.workers or pool.size
        path = f"roles.{role}.workers"
        if workers > pool.size and workers % pool.size:
            rule = f"pool {where.pool} has {pool.size} bundles, and each would get an unequal number"
            yield Problem(path, workers, rule, f"use at most {pool.size}, or a multiple of it")
        peers = where.tensor_parallel * where.sequence_parallel
        if workers % peers:
            rule = f"tensor_parallel x sequence_parallel is {peers} and must divide it"
            yield Problem(path, workers, rule, f"use {max(1, workers // peers) * peers}, or a smaller parallel size")
        uneven = [count for count in pool.nodes or () if count % where.tensor_parallel]
        if where.tensor_parallel > 1 and uneven and not workers % peers:
            rule = f"pool {where.pool} has nodes of {uneven} bundles, so peers would sit on two nodes"
            yield Problem(f"roles.{role}.tensor_parallel", where.tensor_parallel, rule, "pick one that divides them")


def faults_meet_an_engine(config: "RunConfig") -> Iterator[Problem]:
    """A planned fault of an engine or an iteration that there is none of would never happen."""
    if config.rollout.scripted is None or "rollout" not in duties(config):
        return
    engines = num_workers(config, "rollout")
    for index, fault in enumerate(config.rollout.scripted.responses.faults):
        if fault.engine is not None and fault.engine >= engines:
            path = f"rollout.scripted.responses.faults.{index}.engine"
            yield Problem(
                path, fault.engine, f"engines are counted from 0, and there are {engines}", "name one of them"
            )


def fused_roles_agree(config: "RunConfig") -> Iterator[Problem]:
    """Fused roles are one process, so they share its pool, its count and its settings."""
    fused: dict[str, list[RoleName]] = defaultdict(list)
    for role in active_roles(config):
        if config.roles[role].colocate == "fused":
            fused[config.roles[role].pool].append(role)
    for pool, roles in fused.items():
        first = roles[0]
        if len(roles) == 1 and first not in HYBRID_ROLES and len(fused) > 1:
            rule = f"no other fused role stands in pool {pool!r}, and fused roles share a process"
            yield Problem(f"roles.{first}.colocate", "fused", rule, "move it to the others' pool, or use shared")
        for role in roles[1:]:
            mine, theirs = num_workers_of(config, role), num_workers_of(config, first)
            if mine != theirs:
                rule = f"it is fused with {first}, which has {theirs}"
                yield Problem(f"roles.{role}.workers", mine, rule, "give both the same number")
            for setting in _ONE_PER_PROCESS:
                values = {getattr(config.roles[name], setting) for name in (first, role)} - {None}
                if len(values) > 1:
                    rule = f"it is fused with {first}, and one process has one value"
                    yield Problem(f"roles.{role}.{setting}", sorted(values), rule, "set it on one of them")
            env = config.roles[first].env
            for key, value in config.roles[role].env.items():
                if env.get(key, value) != value:
                    rule = f"it is fused with {first}, whose process has {env[key]!r}"
                    yield Problem(f"roles.{role}.env.{key}", value, rule, "set it on one of them")


def num_workers_of(config: "RunConfig", role: RoleName) -> int:
    """Workers of a role by its own name, hybrids too."""
    return num_workers(config, HYBRID_ROLES.get(role, (role,))[0])


def split_roles_are_alone(config: "RunConfig") -> Iterator[Problem]:
    """`split` promises the accelerator to one role."""
    for role in active_roles(config):
        where = config.roles[role]
        if where.colocate != "split":
            continue
        others = [
            other
            for other in active_roles(config)
            if other != role and config.roles[other].pool == where.pool
            and (uses_accelerator(config, other) or not uses_accelerator(config, role))
        ]  # fmt: skip
        if others:
            rule = f"pool {where.pool!r} also holds {others}"
            yield Problem(f"roles.{role}.colocate", "split", rule, "give it a pool of its own, or use shared")


def fractions_need_accelerators(config: "RunConfig") -> Iterator[Problem]:
    """A share of nothing is a mistake in the pool or in the role."""
    for role, where in config.roles.items():
        if where.fraction is not None and config.pools[where.pool].accelerator == "none":
            rule = f"pool {where.pool!r} has no accelerator to share"
            yield Problem(f"roles.{role}.fraction", where.fraction, rule, "remove it, or name the pool's accelerator")


def shares_fit_bundles(config: "RunConfig") -> Iterator[Problem]:
    """On no bundle do accelerator shares exceed 1 or CPUs exceed what the bundle has; slots are not exceeded."""
    groups = process_groups(config)
    for name, pool in config.pools.items():
        here = [group for group in groups if group.pool == name]
        takers = [group for group in here if any(uses_accelerator(config, role) for role in group.roles)]
        whole = cut(pool.accelerators_per_bundle)
        on_bundle: dict[int, list[ProcessGroup]] = defaultdict(list)
        for group in here:
            for place in group.bundles:
                on_bundle[place].append(group)
        for bundle, inside in sorted(on_bundle.items()):
            names = dict(Counter(group.name for group in inside))
            users = [group for group in inside if group in takers]
            shares = [group.accelerators for group in users]
            if sum(shares) > whole * _FULL or (shares and min(shares) <= 0.0):
                listed = ", ".join(f"{group.name} {_given(config, group.name)}" for group in users)
                rule = f"bundle {bundle} holds {listed}, together more than 1 or nothing left for one of them"
                yield Problem(f"pools.{name}", f"{sum(shares) / whole:.4g}", rule, "lower the fractions to 1 in all")
                break
            cpus = [group.cpus for group in inside]
            if sum(cpus) > pool.cpus_per_bundle + 1e-4 or (cpus and min(cpus) <= 0.0):
                listed = ", ".join(f"{group.name} {group.cpus:g}" for group in inside)
                rule = f"bundle {bundle} holds {listed}: {sum(cpus):g} CPUs, or none left for one of them"
                yield Problem(
                    f"pools.{name}.cpus_per_bundle", pool.cpus_per_bundle, rule, "raise it, or lower roles.*.cpus"
                )
                break
            if len(inside) > pool.colocated_groups:
                rule = f"bundle {bundle} holds {len(inside)} processes: {names}"
                path = f"pools.{name}.colocated_groups"
                yield Problem(path, pool.colocated_groups, rule, "raise it, fuse roles, or move one to another pool")
                break


def _given(config: "RunConfig", name: str) -> str:
    shares = [where.fraction for role, where in config.roles.items() if role in name.partition(".")[0].split("+")]
    return next((f"{share:g}" for share in shares if share is not None), "(the rest)")


def environment_is_not_ours(config: "RunConfig") -> Iterator[Problem]:
    """Ranks depend on the keys Callsheet sets, and a secret would land in the stored config."""
    for role, where in config.roles.items():
        for key in where.env:
            path = f"roles.{role}.env.{key}"
            if not _ENV_KEY.match(key) or "\0" in where.env[key]:
                rule = "the name of a variable has neither '=' nor white space, and no text in it holds a NUL"
                yield Problem(path, where.env[key], rule, "correct it, for example NCCL_DEBUG: INFO")
            elif key in PROTECTED_ENV_KEYS:
                yield Problem(
                    path, where.env[key], "Callsheet sets this key for every rank", "remove it, or rename yours"
                )
            elif is_secret_name(key):
                rule = "a config is stored and shown"
                yield Problem(path, "(hidden)", rule, "set it in the environment of the processes instead")


FIRST: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (
    roles_name_pools,
    one_role_per_duty,
    needed_roles_are_there,
    accelerators_are_named,
)
RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (
    pools_have_roles,
    extra_roles_have_work,
    worker_counts_fit,
    faults_meet_an_engine,
    fused_roles_agree,
    split_roles_are_alone,
    fractions_need_accelerators,
    shares_fit_bundles,
    environment_is_not_ours,
)
