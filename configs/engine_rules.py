"""Rules about the engines that sample and the models they load: settings that act, servers, staleness."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from configs.layout import HYBRID_ROLES, duties, placed
from configs.model import CHARACTER_TOKENS
from configs.problems import UNSAID, Problem

if TYPE_CHECKING:
    from configs.run import RunConfig


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
    if servers.agent is not None and config.data.overlong_prompts not in ("filter", "error"):
        rule = "a cut is of token ids, and the agent is given the prompt's text, which would stay whole"
        yield Problem("data.overlong_prompts", config.data.overlong_prompts, rule, "set it to filter or error")
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


def _actor_and_rollout_share_a_process(config: "RunConfig") -> bool:
    table = duties(config)
    if table["actor"] == table["rollout"]:
        return table["actor"] in HYBRID_ROLES
    actor, rollout = placed(config, "actor"), placed(config, "rollout")
    return actor.colocate == rollout.colocate == "fused" and actor.pool == rollout.pool


RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (
    models_can_be_built,
    engine_settings_act,
    server_settings_act,
    rollouts_run_ahead_in_their_own_process,
)
