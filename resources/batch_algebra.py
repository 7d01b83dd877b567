"""How an iteration's rows divide: prompts x group -> rows -> mini-batches -> ranks -> micro-batches."""

from dataclasses import dataclass

from configs.batch_rules import divisors_near, multiples_near
from configs.layout import data_parallel_size
from configs.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one data-parallel rank of a trained role gets of a mini-batch.

    128 rows on 3 ranks with micro-batches of 8: RankShare(duty="actor", ranks=3, rows_most=43, rows_least=42,
    micro_batch="8 sequences", micro_batches=6).
    """

    duty: str
    ranks: int
    rows_most: int
    rows_least: int
    micro_batch: str
    micro_batches: int
    """Forward passes per optimizer step, the same on every rank; a rank short of rows does an empty one."""


@dataclass(frozen=True, kw_only=True)
class BatchAlgebra:
    """P x G = B rows; B / minis rows a step; steps of an iteration; share of each rank; what does not divide."""

    prompts: int
    group_size: int
    rows: int
    mini_batches: int
    rows_per_mini_batch: int
    epochs: int
    steps: int
    rows_per_engine: int
    engines: int
    longest: int
    shares: tuple[RankShare, ...]
    remarks: tuple[str, ...]


def batch_algebra(config: RunConfig) -> BatchAlgebra:
    """Work out how the rows of one iteration divide, and say what does not."""
    rows, minis = config.rows_per_iteration, config.algorithm.num_mini_batches
    per_mini = rows // minis
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    engines = data_parallel_size(config, "rollout")
    duties = ["actor", "critic"] if config.algorithm.needs_critic else ["actor"]
    shares = tuple(_share(config, duty, per_mini, longest) for duty in duties)
    return BatchAlgebra(
        prompts=config.data.prompts_per_iteration,
        group_size=config.rollout.group_size,
        rows=rows,
        mini_batches=minis,
        rows_per_mini_batch=per_mini,
        epochs=config.algorithm.num_ppo_epochs,
        steps=minis * config.algorithm.num_ppo_epochs,
        rows_per_engine=-(-rows // engines),
        engines=engines,
        longest=longest,
        shares=shares,
        remarks=tuple(_remarks(config, shares, per_mini, engines)),
    )


def _share(config: RunConfig, duty: str, per_mini: int, longest: int) -> RankShare:
    section = config.actor if duty == "actor" else config.critic
    ranks = data_parallel_size(config, duty)
    most = -(-per_mini // ranks)
    if section.micro_batch_tokens is not None:
        sequences = max(1, section.micro_batch_tokens // longest)
        text = f"{section.micro_batch_tokens} tokens (at least {sequences} sequences)"
    else:
        sequences, text = section.micro_batch_size, f"{section.micro_batch_size} sequences"
    return RankShare(
        duty=duty,
        ranks=ranks,
        rows_most=most,
        rows_least=per_mini // ranks,
        micro_batch=text,
        micro_batches=-(-most // sequences),
    )


def _remarks(config: RunConfig, shares: tuple[RankShare, ...], per_mini: int, engines: int) -> list[str]:
    remarks: list[str] = []
    sources = [source.name for source in config.data.sources if source.group_size is not None]
    if sources:
        remarks.append(f"sources {sources} have a group size of their own, so rows an iteration differ from these")
    for share in shares:
        if share.rows_most != share.rows_least:
            near = multiples_near(share.ranks, per_mini)
            remarks.append(
                f"{share.duty}: {per_mini} rows a mini-batch do not divide by {share.ranks} ranks, so some hold "
                f"{share.rows_most} and some {share.rows_least}; rows that do divide: {near}"
            )
        section = config.actor if share.duty == "actor" else config.critic
        size = section.micro_batch_size
        if section.micro_batch_tokens is None and share.rows_most % size:
            near = divisors_near(share.rows_most, size)
            remarks.append(
                f"{share.duty}: {share.rows_most} rows a rank do not divide by micro_batch_size {size}, so the last "
                f"micro-batch has {share.rows_most % size}; sizes that do divide: {near}"
            )
    if config.data.prompts_per_iteration % engines:
        near = multiples_near(engines, config.data.prompts_per_iteration)
        remarks.append(
            f"rollout: {config.data.prompts_per_iteration} prompts do not divide by {engines} engines; "
            f"prompts that do: {near}"
        )
    return remarks
