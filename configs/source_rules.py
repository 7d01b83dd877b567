"""Rules about what is sampled and scored: sources, their graders, validation and its best checkpoint."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from configs.problems import Problem

if TYPE_CHECKING:
    from configs.run import RunConfig

_METRIC_ROLES = ("validation", "reward", "rollout", "advantage", "actor", "critic", "teacher", "reward_model", "sft")

_AT_MOST_ONE = ("exact_answer", "positions_right", "numeric_answer", "math_answer", "overlong_penalty")
"""Rules whose best score is 1, or 0 of the penalty."""


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


def demonstrations_have_answers(config: "RunConfig") -> Iterator[Problem]:
    """Rows of a source without a column of answers have none to warm up on."""
    for index, source in enumerate(config.data.sources):
        is_read = source.kind in ("json", "parquet", "hub", "python")
        if is_read and source.answer_column is None and config.sft is not None and config.sft.learns_answers:
            rule = f"the {config.sft.steps} steps of sft are learnt from the answers of the rows"
            way_out = "name the column, give sft.turns without {answer}, or set sft.steps to 0"
            yield Problem(f"data.sources.{index}.answer_column", None, rule, way_out)


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


def length_is_punished_once(config: "RunConfig") -> Iterator[Problem]:
    """The soft penalty on long responses is a grader or a setting of the algorithm; both would add up."""
    named = [grader.name for grader in config.reward.graders if grader.function == "overlong_penalty"]
    if named and config.algorithm.overlong is not None:
        rule = f"grader {named[0]!r} is an overlong_penalty, so that long responses would be punished twice"
        yield Problem("algorithm.overlong", "given", rule, "remove one of the two")


def right_answers_are_told(config: "RunConfig") -> Iterator[Problem]:
    """pass@k compares a score with a threshold; where none can pass it, or a KL is in it, right is taken for wrong."""
    algorithm, clip = config.algorithm, config.reward.clip
    if algorithm.name != "pass_at_k" or algorithm.advantage is not None:
        return
    threshold, path = algorithm.pass_threshold, "algorithm.pass_threshold"
    if algorithm.kl.coef and algorithm.kl.place == "reward":
        rule = "pass@k compares a score with pass_threshold, and a KL in it would turn right answers into wrong ones"
        yield Problem("algorithm.kl.place", "reward", rule, "set it to loss, or leave it out")
    if clip is not None and clip <= threshold:
        rule = f"scores are clipped to reward.clip = {clip:g}, so that no answer counts as right"
        yield Problem(path, threshold, rule, f"set it below {clip:g}, or raise reward.clip")
    for source in config.data.sources:
        scoring = [one for one in config.reward.graders if not one.sources or source.name in one.sources]
        most = sum(one.weight * (one.function != "overlong_penalty") for one in scoring)
        is_known = all(one.function in _AT_MOST_ONE and one.weight >= 0 for one in scoring)
        if scoring and is_known and most <= threshold and not config.reward.normalise:
            rule = f"the best answer to source {source.name!r} scores {most:g}, so that none counts as right"
            yield Problem(path, threshold, rule, f"set it to {most / 2:g}, or raise reward.graders.*.weight")


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


RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (
    graders_cover_sources,
    demonstrations_have_answers,
    rewards_can_differ,
    length_is_punished_once,
    right_answers_are_told,
    validation_has_prompts,
    held_out_rows_are_others,
    best_checkpoint_is_measured,
)
