"""Rules about who teaches: each teacher has a name, sources, a vocabulary like the student's, and workers."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from configs.layout import duties, num_workers, placed
from configs.problems import MISSING, UNSAID, Problem

if TYPE_CHECKING:
    from configs.run import RunConfig


def teachers_are_routed(config: "RunConfig") -> Iterator[Problem]:
    """A distillation has teachers, each with a name, a source and a worker; nothing else has."""
    if config.algorithm.name == "distillation" and config.distillation is None:
        rule = "algorithm.name is distillation"
        yield Problem("distillation", MISSING, rule, "add the section, for example distillation: {coef: 1.0}")
    if config.distillation is not None and not config.teachers:
        yield Problem("teachers", MISSING, "distillation is set, and nobody teaches", "name at least one teacher")
    if config.teachers and config.distillation is None and config.algorithm.name != "distillation":
        yield Problem("teachers", len(config.teachers), "there is no distillation section", "add it, or remove them")
    yield from _top_k_leaves_a_rest(config)
    yield from _kl_is_paid(config)
    known = {source.name for source in config.data.sources}
    names = Counter(teacher.name for teacher in config.teachers)
    for name in [name for name, times in names.items() if times > 1]:
        yield Problem("teachers", name, "two teachers have this name", "rename one of them")
    for index, teacher in enumerate(config.teachers):
        for name in sorted(set(teacher.sources) - known):
            path = f"teachers.{index}.sources"
            yield Problem(path, name, "no training source has this name", f"sources are {sorted(known)}")
        mine, student = teacher.model.shape, config.model.shape
        if mine is not None and student is not None and mine.vocab_size != student.vocab_size:
            rule = f"the student's is {student.vocab_size}, and tokens are compared one by one"
            path = f"teachers.{index}.model.shape.vocab_size"
            yield Problem(path, mine.vocab_size, rule, "use a teacher with the student's tokenizer")
    yield from _every_source_has_one_teacher(config)
    yield from _teacher_pool(config)


def _top_k_leaves_a_rest(config: "RunConfig") -> Iterator[Problem]:
    given, shape = config.distillation, config.model.shape
    if given is None or given.objective != "forward_kl_top_k" or shape is None or given.top_k < shape.vocab_size:
        return
    rule = f"model.shape.vocab_size is {shape.vocab_size}, and the tokens beside the likeliest are one cell"
    yield Problem("distillation.top_k", given.top_k, rule, "lower it, 16 to 64 is usual")


def _kl_is_paid(config: "RunConfig") -> Iterator[Problem]:
    given, algorithm = config.distillation, config.algorithm
    is_alone = given is not None and not (
        algorithm.name != "distillation" if given.task_reward_weight is None else given.task_reward_weight
    )
    if is_alone and algorithm.kl.coef and algorithm.resolved().kl_place == "reward":
        rule = "a KL in the reward is a part of the task's advantages, whose distillation.task_reward_weight is 0"
        yield Problem("algorithm.kl.place", "reward", rule, "set it to loss, or give the task a weight")


def _every_source_has_one_teacher(config: "RunConfig") -> Iterator[Problem]:
    for source in config.data.sources if config.teachers else ():
        found = [teacher.name for teacher in config.teachers if not teacher.sources or source.name in teacher.sources]
        if len(found) != 1:
            rule = f"source {source.name!r} is routed to {found}, and every row has exactly one teacher"
            yield Problem("teachers", UNSAID, rule, "name each source in one teacher's sources")


def _teacher_pool(config: "RunConfig") -> Iterator[Problem]:
    if "teacher" not in duties(config) or not config.teachers:
        return
    if placed(config, "teacher").colocate == "fused":
        rule = "each teacher has processes of its own"
        yield Problem("roles.teacher.colocate", "fused", rule, "use shared, or split with a pool of its own")
        return
    workers, peers = num_workers(config, "teacher"), placed(config, "teacher").tensor_parallel
    if workers < len(config.teachers) * peers:
        rule = f"{len(config.teachers)} teachers need {peers} workers each"
        yield Problem("roles.teacher.workers", workers, rule, f"raise it to at least {len(config.teachers) * peers}")
        return
    given = sum(teacher.workers or 0 for teacher in config.teachers)
    takers = [teacher for teacher in config.teachers if teacher.workers is None]
    if given + len(takers) * peers > workers or (not takers and given != workers):
        rule = f"teachers ask for {given} workers and {len(takers)} teachers for a share, of {workers} in the role"
        yield Problem("teachers", UNSAID, rule, "make teachers.*.workers add up to roles.teacher.workers")
    for index, teacher in enumerate(config.teachers):
        if teacher.workers is not None and teacher.workers % peers:
            rule = f"roles.teacher.tensor_parallel is {peers} and must divide it"
            yield Problem(f"teachers.{index}.workers", teacher.workers, rule, "use a multiple of it")


RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (teachers_are_routed,)
