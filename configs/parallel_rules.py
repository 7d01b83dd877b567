"""Rules about roles whose models are cut over ranks: what can be cut, and who reads the sizes."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from configs.layout import HYBRID_ROLES, active_roles
from configs.model import ModelShape
from configs.pools import RoleName
from configs.problems import Problem

if TYPE_CHECKING:
    from configs.run import RunConfig

_CUT_BY_TENSOR = ("actor", "critic", "reference", "rollout", "teacher")
_CUT_BY_SEQUENCE = ("actor", "critic", "reference")


def parallel_sizes_are_read(config: "RunConfig") -> Iterator[Problem]:
    """A role that cuts no model would take its workers for peers that need the same rows, and score them twice."""
    for role in active_roles(config):
        where, its = config.roles[role], HYBRID_ROLES.get(role, (role,))
        for key, size, readers in (
            ("tensor_parallel", where.tensor_parallel, _CUT_BY_TENSOR),
            ("sequence_parallel", where.sequence_parallel, _CUT_BY_SEQUENCE),
        ):
            if size > 1 and not set(its) & set(readers):
                rule = f"only {', '.join(readers)} read it"
                yield Problem(f"roles.{role}.{key}", size, rule, "leave it out; more workers take more rows at a time")


def ranks_divide_the_heads(config: "RunConfig") -> Iterator[Problem]:
    """A head lies on one rank. Asked where the shape of the model is given; else the worker asks at its start."""
    for role in active_roles(config):
        where = config.roles[role]
        peers = where.tensor_parallel * where.sequence_parallel
        if (where.workers or config.pools[where.pool].size) % peers:
            continue  # the number of workers is wrong already
        for path, shape in _shapes_of(config, role):
            parts = "tensor_parallel" if where.sequence_parallel == 1 else "sequence_parallel"
            at = f"roles.{role}.{parts}"
            if shape.num_heads % peers:
                rule = f"{path}.num_heads is {shape.num_heads}, and {peers} ranks must divide the heads"
                yield Problem(at, getattr(where, parts), rule, f"pick a divisor of {shape.num_heads}")
                continue
            kv_heads, ranks = shape.num_kv_heads or shape.num_heads, where.tensor_parallel
            copies_heads = role == "rollout" and config.rollout.engine == "vllm" and ranks % kv_heads == 0
            if kv_heads % ranks and not copies_heads:
                rule = f"{path}.num_kv_heads is {kv_heads}, and {ranks} ranks must divide them"
                yield Problem(f"roles.{role}.tensor_parallel", ranks, rule, f"pick a divisor of {kv_heads}")


def _shapes_of(config: "RunConfig", role: RoleName) -> Iterator[tuple[str, ModelShape]]:
    if role == "teacher":
        models = {f"teachers.{n}.model": teacher.model for n, teacher in enumerate(config.teachers)}
    elif role == "critic" and config.critic.model is not None:
        models = {"critic.model": config.critic.model}
    elif role in ("reward", "env", "advantage"):
        models = {}
    else:
        models = {"model": config.model}
    for path, model in models.items():
        if model.shape is not None:
            yield f"{path}.shape", model.shape


RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (parallel_sizes_are_read, ranks_divide_the_heads)
