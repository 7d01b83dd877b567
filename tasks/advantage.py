"""The advantage step: from scores to advantages, on a CPU worker, over the whole rollout batch."""

from functools import partial

from configs.run import RunConfig
from resources.seeding import stream_seed
from resources.store import BatchHandle
from tasks.host import host
from tasks.objectives_of import advantage_columns, advantage_function
from tasks.on_rows import Shaping, advantages_of_rows
from tasks.replies import call
from tasks.stamp import Stamp
from tasks.step import StepResult, step

ADVANTAGE_COLUMNS = ("token_rewards", "advantages", "returns", "train_mask", "correction_weights", "selected_mask")


@step(
    role="advantage",
    reads=(
        "response_mask",
        "scores",
        "values",
        "old_log_probs",
        "entropy",
        "rollout_log_probs",
        "ref_log_probs",
        "teacher_log_probs",
        "finish_reasons",
        "response_lengths",
        "policy_versions",
        "baseline_scores",
        "bootstrap_values",
    ),
    writes=ADVANTAGE_COLUMNS,
)
def advantage(at: Stamp, batches: list[BatchHandle]) -> StepResult:
    """Add `token_rewards`, `advantages`, `train_mask`, and `returns` where there is a critic."""
    config = host().config
    shaping = shaping_of(config, at)
    more = ("response_lengths",) if shaping.overlong is not None else ()
    # Only servers give a response up, and only where there are scores is there a baseline to keep clean of it.
    more += ("finish_reasons",) if config.rollout.servers.enabled and "scores" in advantage_columns(config) else ()
    rows = host().read(*batches, columns=(*advantage_columns(config), "policy_versions", *more))
    estimator = advantage_function(config, at.kl_coef, stream_seed(config.seed, "advantage", at.iteration))
    fn = partial(advantages_of_rows, estimator=estimator, shaping=shaping)
    return call("advantage", "apply", fn, rows, is_bulk=True).keep(at.batch_id)


def shaping_of(config: RunConfig, at: Stamp) -> Shaping:
    """The over-long penalty and the bound on staleness, as numbers."""
    overlong, reward = config.algorithm.overlong, config.reward
    is_refilled = config.algorithm.resolved().dynamic_sampling
    # A rollout that scores its own rows tells the mean of all it sampled; of those it kept this is the only one.
    is_rescaled = (reward.normalise or reward.clip is not None) and not is_refilled
    return Shaping(
        overlong=None if overlong is None else (overlong.max_length, overlong.buffer, overlong.factor),
        policy_version=at.policy_version,
        max_staleness=config.algorithm.correction.max_staleness,
        is_rescaled=is_rescaled,
        is_refilled=is_refilled,
    )
