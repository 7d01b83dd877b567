"""Rules about sizes: rows, groups, mini-batches, lengths and token budgets."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from configs.layout import data_parallel_size
from configs.problems import UNSAID, Problem

if TYPE_CHECKING:
    from configs.run import RunConfig


MAX_KL_ERROR = 0.2
"""The adaptive controller's largest relative error, see `tasks.algorithms.kl`; rules import no torch."""


def divisors_near(total: int, wanted: int, count: int = 4) -> list[int]:
    """The divisors of `total` nearest to `wanted`, in rising order.

    >>> divisors_near(96, 5)
    [2, 3, 4, 6]
    """
    small = [number for number in range(1, math.isqrt(total) + 1) if total % number == 0]
    divisors = {*small, *(total // number for number in small)}
    return sorted(sorted(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))[:count])


def multiples_near(step: int, wanted: int) -> list[int]:
    """The two multiples of `step` around `wanted`, zero left out.

    >>> multiples_near(6, 50)
    [48, 54]
    """
    below = wanted // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]


def groups_have_siblings(config: "RunConfig") -> Iterator[Problem]:
    """A lone response has zero advantage, or none at all."""
    sizes = {"rollout.group_size": config.rollout.group_size}
    for index, source in enumerate(config.data.sources):
        if source.group_size is not None:
            sizes[f"data.sources.{index}.group_size"] = source.group_size
    if config.algorithm.is_group_relative:
        for path, size in sizes.items():
            if size < 2:
                rule = f"{config.algorithm.name} needs at least 2, since a lone response has zero advantage"
                yield Problem(path, size, rule, "set it to 2 or more (8 is usual), or use algorithm.name ppo")
    if config.algorithm.name == "pass_at_k":
        for path, size in sizes.items():
            if config.algorithm.pass_k > size:
                rule = f"pass@k looks at k of {path} = {size} responses"
                yield Problem("algorithm.pass_k", config.algorithm.pass_k, rule, "lower it, or sample more responses")


def mini_batches_divide_the_rows(config: "RunConfig") -> Iterator[Problem]:
    """Optimizer steps are of equal size, and every rank has a row in each."""
    rows, minis = config.rows_per_iteration, config.algorithm.num_mini_batches
    if rows % minis and not any(source.group_size for source in config.data.sources):
        rule = (
            f"data.prompts_per_iteration x rollout.group_size = {config.data.prompts_per_iteration} x "
            f"{config.rollout.group_size} = {rows} rows do not divide by it"
        )
        yield Problem("algorithm.num_mini_batches", minis, rule, f"near values that do: {divisors_near(rows, minis)}")
    trained = ["actor", "critic"] if config.algorithm.needs_critic else ["actor"]
    for duty in trained:
        ranks = data_parallel_size(config, duty)
        if rows // minis < ranks:
            rule = f"a mini-batch then has {rows // minis} rows for the {ranks} data-parallel ranks of the {duty}"
            yield Problem(
                "algorithm.num_mini_batches", minis, rule, f"use at most {max(1, rows // ranks)}, or more prompts"
            )


def lengths_fit(config: "RunConfig") -> Iterator[Problem]:
    """Prompt and response fit the engine, the positions, and a micro-batch."""
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    longest = prompt + response
    said = f"data.max_prompt_length + rollout.max_response_length = {prompt} + {response} = {longest} tokens"
    limit = config.rollout.max_model_length
    if limit is not None and limit < longest:
        rule = f"{said} must fit in it"
        yield Problem("rollout.max_model_length", limit, rule, f"set it to {longest} or leave it out")
    shape = config.model.shape
    needed = max(longest, limit or 0)
    if shape is not None and shape.max_positions < needed:
        what = said if needed == longest else f"rollout.max_model_length = {needed} tokens"
        rule = f"{what} must have positions"
        yield Problem("model.shape.max_positions", shape.max_positions, rule, f"raise it to {needed}, or shorten")
    for duty in ("actor", "critic"):
        section = config.actor if duty == "actor" else config.critic
        budget = section.micro_batch_tokens
        if budget is not None and budget < longest:
            rule = f"{said} must fit in one micro-batch"
            yield Problem(f"{duty}.micro_batch_tokens", budget, rule, f"raise it to at least {longest}")


def sources_fill_an_iteration(config: "RunConfig") -> Iterator[Problem]:
    """Sizes of the sources that the config tells; of tables that are kept whole the run counts the rows."""
    given = {
        "data": (config.data.sources, "data.prompts_per_iteration", config.data.prompts_per_iteration),
        "validation": (config.validation.sources, "validation.num_prompts", config.validation.num_prompts),
    }
    for section, (sources, path, wanted) in given.items():
        sizes = [source.most_rows for source in sources]
        known = [size for size in sizes if size is not None]
        if sizes and len(known) == len(sizes) and sum(known) < wanted:
            yield shortage(section, path, wanted, sum(known))


def shortage(section: str, path: str, wanted: int, rows: int) -> Problem:
    """Sources of `section` that have fewer rows than `path` asks for."""
    return Problem(path, wanted, f"{section}.sources have {rows} rows", f"add rows, or set it to at most {rows}")


def stop_tokens_exist(config: "RunConfig") -> Iterator[Problem]:
    """A stop token that the model does not have ends no response."""
    shape = config.model.shape
    beyond = [token for token in config.rollout.sampling.stop_token_ids if shape and token >= shape.vocab_size]
    if shape is not None and beyond:
        rule = f"{beyond} are in no response: model.shape.vocab_size is {shape.vocab_size}"
        yield Problem("rollout.sampling.stop_token_ids", UNSAID, rule, "give ids of the model's own tokenizer")


def overlong_penalty_acts(config: "RunConfig") -> Iterator[Problem]:
    """A penalty that starts beyond the longest response would silently do nothing."""
    overlong = config.algorithm.overlong
    if overlong is not None and overlong.max_length - overlong.buffer >= config.rollout.max_response_length:
        start, longest = overlong.max_length - overlong.buffer, config.rollout.max_response_length
        rule = f"less its buffer of {overlong.buffer} the penalty starts at {start}, and no response passes {longest}"
        yield Problem("algorithm.overlong.max_length", overlong.max_length, rule, f"set it to {longest}")


def kl_settings_act(config: "RunConfig") -> Iterator[Problem]:
    """What steers or refreshes the reference needs a reference."""
    kl = config.algorithm.kl
    if kl.coef == 0.0:
        if kl.controller == "adaptive":
            rule = "algorithm.kl.coef is 0, and a multiple of 0 stays 0"
            yield Problem("algorithm.kl.controller", kl.controller, rule, "give coef a start, for example 0.001")
        if kl.refresh_every is not None:
            rule = "algorithm.kl.coef is 0, so there is no reference to refresh"
            yield Problem("algorithm.kl.refresh_every", kl.refresh_every, rule, "set coef above 0, or leave it out")
    if kl.controller == "adaptive" and kl.horizon <= MAX_KL_ERROR * config.rows_per_iteration:
        rows = config.rows_per_iteration
        rule = f"an iteration has {rows} rows, and a move of {MAX_KL_ERROR} x rows / horizon could turn coef negative"
        least = f"set it above {MAX_KL_ERROR * rows:g}, for example to {20 * rows}"
        yield Problem("algorithm.kl.horizon", kl.horizon, rule, least)
    if (
        kl.coef
        and kl.estimator == "k1"
        and config.algorithm.resolved().kl_place == "loss"
        and not config.algorithm.loss
    ):
        rule = "in a loss the gradient of k1 is 0 on average, so that nothing would pull"
        yield Problem("algorithm.kl.estimator", "k1", rule, "use k1-straight-through, k2 or k3, or place: reward")
    if kl.refresh_every is not None and config.model.lora is not None:
        rule = "with model.lora the reference is the base model, which never changes"
        yield Problem("algorithm.kl.refresh_every", kl.refresh_every, rule, "leave it out, or train without LoRA")


def critic_settings_act(config: "RunConfig") -> Iterator[Problem]:
    """Warm-up iterations are for a critic, and end before the run does."""
    warmup = config.algorithm.critic_warmup_iterations
    path = "algorithm.critic_warmup_iterations"
    if warmup and not config.algorithm.needs_critic:
        yield Problem(path, warmup, f"algorithm {config.algorithm.name} has no critic", "set it to 0")
    elif warmup >= config.iterations:
        rule = f"the run has {config.iterations} iterations, so the actor would never learn"
        yield Problem(path, warmup, rule, "make it smaller than iterations")
    if config.algorithm.bootstrap_truncated and not config.algorithm.needs_critic:
        rule = f"algorithm {config.algorithm.name} has no critic to take the value from"
        yield Problem("algorithm.bootstrap_truncated", True, rule, "set it to false, or use algorithm.name ppo")
    if config.algorithm.bootstrap_truncated and config.reward.truncated_score is not None:
        rule = "reward.truncated_score already says what a cut response is worth"
        yield Problem("algorithm.bootstrap_truncated", True, rule, "use one of the two")
    if config.critic.from_reward_model and config.critic.model is None:
        rule = "critic.model is not set, so there is no reward model to start from"
        yield Problem("critic.from_reward_model", True, rule, "give critic.model the reward model's path")
    elif config.critic.from_reward_model and config.critic.model is not None and config.critic.model.path is None:
        rule = "critic.model is built here, and has never seen a preference"
        yield Problem("critic.from_reward_model", True, rule, "give critic.model the reward model's path")


def target_kl_acts(config: "RunConfig") -> Iterator[Problem]:
    """The policy is compared with itself before the first step, so there must be a second one to leave out."""
    algorithm = config.algorithm
    if algorithm.target_kl is not None and algorithm.num_ppo_epochs == algorithm.num_mini_batches == 1:
        rule = "an iteration has one optimizer step, before which the policy has not moved"
        yield Problem("algorithm.target_kl", algorithm.target_kl, rule, "leave it out, or take more mini-batches")


def correction_acts(config: "RunConfig") -> Iterator[Problem]:
    """A bound that the mode does not read or that leaves no row, or a second weight on a loss that has its own."""
    correction = config.algorithm.correction
    if correction.mode in ("reject-k2", "reject-k3") and correction.lower > 0.0:
        rule = f"{correction.mode} rejects what is above `upper`; a mean KL near 0 is what is wanted"
        yield Problem("algorithm.correction.lower", correction.lower, rule, "set it to 0")
    if correction.mode in ("icepop", "reject-k1") and not correction.lower <= 1.0 <= correction.upper:
        name, side = ("lower", "less") if correction.lower > 1.0 else ("upper", "more")
        rule = f"{correction.mode} rejects what is outside [lower, upper], and what is on policy weighs 1"
        yield Problem(f"algorithm.correction.{name}", getattr(correction, name), rule, f"set it to 1 or {side}")
    oldest, depth = correction.max_staleness, config.async_depth
    if oldest is not None and oldest < depth and not config.rollout.servers.updates_while_sampling:
        rule = f"async_depth is {depth}, so that all rows but the first are as old, and none would be trained on"
        yield Problem("algorithm.correction.max_staleness", oldest, rule, f"set it to {depth} or more")
    if config.algorithm.name == "decoupled_ppo" and correction.mode not in (None, "off"):
        rule = "decoupled_ppo weighs its loss towards the policy that sampled, and would do so twice"
        yield Problem("algorithm.correction.mode", correction.mode, rule, "set it to off, or use algorithm.name ppo")


def prompts_can_be_solved(config: "RunConfig") -> Iterator[Problem]:
    """The curriculum compares scores as they are trained on."""
    clip, solved = config.reward.clip, config.data.solved_score
    if config.data.curriculum == "skip_solved" and clip is not None and clip < solved and not config.reward.normalise:
        rule = f"scores are clipped to reward.clip = {clip:g}, so that no prompt is ever solved"
        yield Problem("data.solved_score", solved, rule, f"set it to {clip:g} or less, or raise reward.clip")


def dynamic_sampling_has_groups(config: "RunConfig") -> Iterator[Problem]:
    """Whether a group has signal is a question about siblings."""
    if config.algorithm.dynamic_sampling.enabled and not config.algorithm.is_group_relative:
        rule = f"algorithm {config.algorithm.name} does not compare siblings, so no group is without signal"
        yield Problem("algorithm.dynamic_sampling.enabled", True, rule, "turn it off, or use a group algorithm")


def scoring_under_the_rollout_acts(config: "RunConfig") -> Iterator[Problem]:
    """What is scored while it is sampled has no place for a scale that is known only after the batch."""
    is_refilled = config.algorithm.resolved().dynamic_sampling
    if config.reward.normalise and (is_refilled or config.algorithm.name == "remax"):
        what = "dynamic sampling compares" if is_refilled else "remax's baseline takes"
        rule = f"{what} scores while sampling, before the running deviation of the batch is known"
        yield Problem("reward.normalise", True, rule, "set it to false; the estimator is free of the scores' scale")
    if config.async_depth and (is_refilled or config.data.curriculum != "none"):
        why = "dynamic sampling is on" if is_refilled else "data.curriculum is skip_solved"
        rule = f"{why}, so where the next rollout's prompts begin is known only when this one's are scored"
        yield Problem("async_depth", config.async_depth, rule, "set it to 0, or turn the other off")


RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (
    groups_have_siblings,
    mini_batches_divide_the_rows,
    lengths_fit,
    sources_fill_an_iteration,
    stop_tokens_exist,
    overlong_penalty_acts,
    kl_settings_act,
    critic_settings_act,
    target_kl_acts,
    correction_acts,
    prompts_can_be_solved,
    dynamic_sampling_has_groups,
    scoring_under_the_rollout_acts,
)
