"""Rules about what is sampled, scored and taught: sources, graders, engines, teachers, staleness."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from configs.environment import is_secret_name
from configs.layout import HYBRID_ROLES, duties, num_workers, placed
from configs.model import CHARACTER_TOKENS
from configs.problems import MISSING, UNSAID, Problem

if TYPE_CHECKING:
    from configs.run import RunConfig

_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_HOST_AND_PORT = re.compile(r"^[^\s/@]+:(?!0+$)(?:\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])$")
_METRIC_ROLES = ("validation", "reward", "rollout", "advantage", "actor", "critic", "teacher", "reward_model", "sft")
_IMPORT_PATH = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


def graders_cover_sources(config: "RunConfig") -> Iterator[Problem]:
    """Every source has a grader, every grader a source, and names are told apart."""
    names = Counter(grader.name for grader in config.reward.graders)
    for name, times in names.items():
        if times > 1:
            yield Problem("reward.graders", name, f"{times} graders have this name", "rename one of them")
    known = {source.name for source in [*config.data.sources, *config.validation.sources]}
    for index, grader in enumerate(config.reward.graders):
        for name in sorted(set(grader.sources) - known):
            path = f"reward.graders.{index}.sources"
            yield Problem(path, name, "no source has this name", f"sources are {sorted(known)}")
    if all(grader.sources for grader in config.reward.graders):
        scored = {name for grader in config.reward.graders for name in grader.sources}
        for source in [*config.data.sources, *config.validation.sources]:
            if source.name not in scored:
                rule = "no grader scores this source"
                yield Problem(
                    "reward.graders", source.name, rule, "add it to a grader's sources, or leave sources empty"
                )


def rewards_can_differ(config: "RunConfig") -> Iterator[Problem]:
    """A source whose graders all weigh nothing gives every response the same reward, and nothing is learned from it."""
    if config.teachers:  # They teach whatever the rewards are.
        return
    graders = config.reward.graders
    for source in config.data.sources:
        scoring = [(index, one) for index, one in enumerate(graders) if not one.sources or source.name in one.sources]
        if scoring and not any(one.weight for _, one in scoring):
            index = scoring[0][0]
            rule = f"no grader of source {source.name!r} has another weight, so that all its rewards would be 0"
            yield Problem(f"reward.graders.{index}.weight", 0.0, rule, "give one of them a weight, for example 1")


def validation_has_prompts(config: "RunConfig") -> Iterator[Problem]:
    """Validating on nothing would report nothing."""
    if config.validation.every and not config.validation.sources:
        rule = "validation.sources is empty"
        yield Problem("validation.every", config.validation.every, rule, "name held-out sources, or set it to 0")


def held_out_rows_are_others(config: "RunConfig") -> Iterator[Problem]:
    """A table that is both trained and validated on tells what was learnt by heart; other kinds hold a part back."""
    for index, held_out in enumerate(config.validation.sources):
        for number, source in enumerate(config.data.sources):
            if held_out.kind != source.kind or source.kind not in ("json", "parquet", "hub"):
                continue
            is_split = source.kind != "hub" or (held_out.split, held_out.options) == (source.split, source.options)
            if held_out.path == source.path and is_split:
                rule = f"data.sources.{number} trains on these rows"
                yield Problem(f"validation.sources.{index}.path", held_out.path, rule, "name another file or split")


def best_checkpoint_is_measured(config: "RunConfig") -> Iterator[Problem]:
    """The best checkpoint is one of those whose own iteration ended with the metric."""
    name, validation, saves = config.checkpoint.keep_best, config.validation, config.checkpoint.every
    if name is None:
        return
    path = "checkpoint.keep_best"
    if not name.startswith("validation/"):
        if name.partition("/")[0] not in _METRIC_ROLES:
            rule = f"metrics are named after {', '.join(_METRIC_ROLES)}"
            yield Problem(path, name, rule, "for example validation/sampled_accuracy")
        return
    kinds = ["sampled_accuracy", *(["accuracy"] if validation.greedy else [])]
    if validation.samples_per_prompt > 1:
        kinds += [f"{kind}_at_{validation.samples_per_prompt}" for kind in ("best", "majority")]
    sources = [source.name for source in validation.sources]
    prefixes = ["validation", *(f"validation/source/{source}" for source in sources if len(sources) > 1)]
    known = [f"{prefix}/{kind}" for prefix in prefixes for kind in kinds]
    if name.removesuffix("/low").removesuffix("/high") not in known:
        yield Problem(path, name, "no validation of this run gives it", f"it gives {known}")
    elif not (validation.every and saves) or math.lcm(validation.every, saves) >= config.iterations:
        rule = (
            f"validation.every is {validation.every} and checkpoint.every {saves}, so that no iteration before the "
            f"last of {config.iterations} has both"
        )
        yield Problem(path, name, rule, "make checkpoint.every a multiple of validation.every")


def secrets_are_named(config: "RunConfig") -> Iterator[Problem]:
    """Keys come from the environment by name; an address carries none."""
    addresses = [("prefect.api_url", config.prefect.api_url), ("ray.address", config.ray.address)]
    for index, grader in enumerate(config.reward.graders):
        addresses.append((f"reward.graders.{index}.url", grader.url))
        if grader.judge is not None:
            path = f"reward.graders.{index}.judge"
            addresses.append((f"{path}.base_url", grader.judge.base_url))
            name = grader.judge.api_key_env
            if name is not None and not _ENV_NAME.match(name):
                rule = "it must be the name of an environment variable, never the key itself"
                yield Problem(f"{path}.api_key_env", "(hidden)", rule, "for example OPENAI_API_KEY")
    for path, address in addresses:
        if address is not None and "@" in address.rpartition("//")[2].partition("/")[0]:
            yield Problem(path, "(hidden)", "an address must not carry a password", "take the part before @ out")
        elif address is not None and (named := [key for key, _ in parse_qsl(_query(address)) if is_secret_name(key)]):
            rule = f"its query holds {named[0]}, and the config is stored with the run"
            yield Problem(path, "(hidden)", rule, "leave it out; a judge takes its key from api_key_env")


def _query(address: str) -> str:
    return address.partition("?")[2].partition("#")[0]


def addresses_are_whole(config: "RunConfig") -> Iterator[Problem]:
    """A service is asked over HTTP: what is no such address would fail for each response, hours later."""
    cluster = config.ray.address
    if cluster is not None and not _HOST_AND_PORT.match(cluster):
        rule = "a Ray cluster is a host and a port below 65536, without http://"
        yield Problem("ray.address", cluster, rule, "for example 10.0.0.1:6379, or leave it out to start one here")
    given = {"prefect.api_url": config.prefect.api_url}
    for index, grader in enumerate(config.reward.graders):
        given[f"reward.graders.{index}.url"] = grader.url
        given[f"reward.graders.{index}.judge.base_url"] = grader.judge.base_url if grader.judge is not None else None
    for path, address in given.items():
        if address is not None and "@" not in address and not _is_http(address):
            rule = "the address of a service is http:// or https://, a host, and a port below 65536 if any"
            yield Problem(path, address, rule, "for example http://127.0.0.1:8000/v1")


def _is_http(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and address.split() == [address]
        )
    except ValueError:  # a port that is none, a bracket that is not closed
        return False


def named_code(config: "RunConfig") -> dict[str, str]:
    """Key -> `module:function` of everything of the user's own that the config names."""
    given = {
        "algorithm.advantage": config.algorithm.advantage,
        "algorithm.loss": config.algorithm.loss,
        "rollout.servers.agent": config.rollout.servers.agent,
        **{f"roles.{role}.worker": where.worker for role, where in config.roles.items()},
    }
    for index, grader in enumerate(config.reward.graders):
        if grader.kind == "python":
            given[f"reward.graders.{index}.function"] = grader.function
    for section, sources in (("data", config.data.sources), ("validation", config.validation.sources)):
        for index, source in enumerate(sources):
            if source.kind == "python":
                given[f"{section}.sources.{index}.path"] = source.path
    if config.rollout.tools is not None:
        given["rollout.tools.environment"] = config.rollout.tools.environment
    for index, function in enumerate(config.rollout.tools.functions if config.rollout.tools else ()):
        given[f"rollout.tools.functions.{index}"] = function
    return {path: value for path, value in given.items() if value is not None}


def import_paths_are_whole(config: "RunConfig") -> Iterator[Problem]:
    """`module:function` names a function; anything else fails an hour later on another node."""
    for path, value in named_code(config).items():
        if not _IMPORT_PATH.match(value):
            yield Problem(path, value, "an import path is package.module:name", "for example my_project.rewards:score")


def models_can_be_built(config: "RunConfig") -> Iterator[Problem]:
    """A model that is made here has a token for each character, and heads that rotary positions can turn."""
    models = {"model": config.model, "critic.model": config.critic.model}
    models |= {f"teachers.{number}.model": teacher.model for number, teacher in enumerate(config.teachers)}
    for path, model in models.items():
        if model is None or model.build is None or model.shape is None:
            continue
        shape = model.shape
        if model.tokenizer_path is None and shape.vocab_size < CHARACTER_TOKENS:
            rule = f"the character tokenizer of {path}.build has {CHARACTER_TOKENS} tokens"
            yield Problem(f"{path}.shape.vocab_size", shape.vocab_size, rule, "raise it to at least that")
        if shape.head_dim % 2:
            rule = f"a head is {shape.head_dim} numbers wide, and rotary positions turn pairs of numbers"
            yield Problem(f"{path}.shape", UNSAID, rule, "pick hidden_size / num_heads, or head_width, even")


def engine_settings_act(config: "RunConfig") -> Iterator[Problem]:
    """Settings of one engine or way of sync are refused where they would be ignored."""
    rollout = config.rollout
    if rollout.servers.enabled and placed(config, "rollout").colocate == "fused":
        rule = "roles.rollout is fused with other roles, and each server is a process of its own"
        yield Problem("rollout.servers.enabled", True, rule, "make roles.rollout.colocate shared or split")
    if rollout.tools is not None and placed(config, "rollout").tensor_parallel > 1 and not rollout.servers.enabled:
        rule = "tools answer each peer of a tensor-parallel engine at another time, and peers must be told the same"
        yield Problem("rollout.tools", "given", rule, "enable rollout.servers, or set tensor_parallel to 1")
    if rollout.tools is not None and not rollout.tools.functions and rollout.tools.environment is None:
        yield Problem(
            "rollout.tools", "given", "it names neither functions nor an environment", "name one, or remove it"
        )
    if rollout.offload and rollout.servers.enabled:
        rule = "servers take requests at any time, so their engines stay where they are"
        yield Problem("rollout.offload", True, rule, "set it to false, or disable rollout.servers")
    if rollout.offload and config.pools[placed(config, "rollout").pool].accelerator == "none":
        rule = "the engine works on CPUs, where there is no accelerator's memory to give back"
        yield Problem("rollout.offload", True, rule, "set it to false")
    is_one_process = _actor_and_rollout_share_a_process(config)
    if rollout.weight_sync == "in_process" and not is_one_process:
        rule = "actor and rollout are processes of their own"
        yield Problem("rollout.weight_sync", "in_process", rule, "fuse the two roles, or use auto")
    if rollout.weight_sync == "process_group" and is_one_process:
        rule = "actor and rollout are one process, which cannot be two ranks"
        yield Problem("rollout.weight_sync", "process_group", rule, "use auto")
    if config.data.chat_template and config.model.build is not None and config.model.tokenizer_path is None:
        rule = f"model.build is {config.model.build!r}, whose character tokenizer has no chat template"
        yield Problem("data.chat_template", True, rule, "turn it off, or give model.tokenizer_path")
    if config.data.system_prompt is not None and not config.data.chat_template:
        rule = "data.chat_template is false, and only a template has a place for it"
        yield Problem("data.system_prompt", config.data.system_prompt, rule, "set chat_template to true, or remove it")


def server_settings_act(config: "RunConfig") -> Iterator[Problem]:
    """Settings of the rollout servers are refused where nothing would read them."""
    rollout = config.rollout
    servers = rollout.servers
    given = {
        "rollout.servers.openai_port": servers.openai_port,
        "rollout.servers.agent": servers.agent,
        "rollout.servers.updates_while_sampling": servers.updates_while_sampling or None,
        "rollout.stuck_response_seconds": rollout.stuck_response_seconds,
    }
    if not servers.enabled:
        for path, value in given.items():
            if value is not None:
                yield Problem(path, value, "rollout.servers.enabled is false, so it means nothing", "enable servers")
        return
    if servers.agent is not None and rollout.tools is not None:
        rule = "the agent plays whole episodes, its tools and environments included"
        yield Problem("rollout.tools", "given", rule, "remove it, or rollout.servers.agent")
    if servers.updates_while_sampling and not config.async_depth:
        rule = "async_depth is 0, so nothing is sampled while weights are loaded"
        yield Problem("rollout.servers.updates_while_sampling", True, rule, "set async_depth to 1 or more")


def rollouts_run_ahead_in_their_own_process(config: "RunConfig") -> Iterator[Problem]:
    """One process cannot sample the next batch while it updates."""
    if config.async_depth > 0 and _actor_and_rollout_share_a_process(config):
        role = duties(config)["rollout"]
        rule = f"{role} does the actor's work in the same process, so no rollout can run beside an update"
        apart = "rollout a pool of its own and colocate: shared"
        if role in HYBRID_ROLES:
            apart = f"each duty of {role} a role of its own, {apart}"
        yield Problem("async_depth", config.async_depth, rule, f"give {apart}, or set async_depth to 0")


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


def local_cluster_settings_act(config: "RunConfig") -> Iterator[Problem]:
    """Sizes of a local cluster mean nothing to one that already runs."""
    if config.ray.address is not None:
        for name, value in (("num_cpus", config.ray.num_cpus), ("num_gpus", config.ray.num_gpus)):
            if value is not None:
                rule = f"ray.address is {config.ray.address!r}, and that cluster has its own size"
                yield Problem(f"ray.{name}", value, rule, "remove one of the two")
    if config.prefect.api_url is not None and config.prefect.home is not None:
        rule = f"prefect.api_url is {config.prefect.api_url!r}, and that server has its own database"
        yield Problem("prefect.home", config.prefect.home, rule, "remove one of the two")


def _actor_and_rollout_share_a_process(config: "RunConfig") -> bool:
    table = duties(config)
    if table["actor"] == table["rollout"]:
        return table["actor"] in HYBRID_ROLES
    actor, rollout = placed(config, "actor"), placed(config, "rollout")
    return actor.colocate == rollout.colocate == "fused" and actor.pool == rollout.pool


RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (
    graders_cover_sources,
    rewards_can_differ,
    validation_has_prompts,
    held_out_rows_are_others,
    best_checkpoint_is_measured,
    secrets_are_named,
    addresses_are_whole,
    import_paths_are_whole,
    models_can_be_built,
    engine_settings_act,
    server_settings_act,
    rollouts_run_ahead_in_their_own_process,
    teachers_are_routed,
    local_cluster_settings_act,
)
