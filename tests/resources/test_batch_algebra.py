"""How rows divide, by hand, and what is said about what does not."""

from configs.batch_rules import divisors_near, multiples_near
from configs.load import load_config
from resources.batch_algebra import RankShare, batch_algebra

SPLIT = "gsm8k-qwen2.5-1.5b-8gpu-split-pools"


def test_the_quick_start_divides_without_remark():
    algebra = batch_algebra(
        load_config("quickstart", ["data.prompts_per_iteration=512", "algorithm.num_mini_batches=4"])
    )
    assert (algebra.rows, algebra.rows_per_mini_batch, algebra.steps, algebra.rows_per_engine) == (512, 128, 8, 512)
    assert algebra.remarks == ()


def test_groups_multiply_the_prompts():
    algebra = batch_algebra(load_config("quickstart-grpo"))
    assert (algebra.prompts, algebra.group_size, algebra.rows) == (128, 8, 1024)


def test_rows_that_do_not_divide_by_the_ranks_are_named_with_near_ones_that_do():
    # 50 rows on 3 ranks: 17, 17 and 16; micro-batches of 8 make three passes on each, the last of 1
    config = load_config(
        SPLIT,
        [
            "data.prompts_per_iteration=100",
            "algorithm.num_mini_batches=2",
            "pools.training.nodes=[3]",
            "actor.micro_batch_tokens=null",
            "actor.micro_batch_size=8",
        ],
    )
    algebra = batch_algebra(config)
    assert algebra.shares[0] == RankShare(
        duty="actor", ranks=3, rows_most=17, rows_least=16, micro_batch="8 sequences", micro_batches=3
    )
    assert algebra.remarks == (
        "actor: 50 rows a mini-batch do not divide by 3 ranks, so some hold 17 and some 16; "
        "rows that do divide: [48, 51]",
        "actor: 17 rows a rank do not divide by micro_batch_size 8, so the last micro-batch has 1; "
        "sizes that do divide: [1, 17]",
    )


def test_a_token_budget_counts_whole_sequences():
    algebra = batch_algebra(load_config(SPLIT))
    actor = algebra.shares[0]
    # 1,024 rows / 8 mini-batches / 2 ranks = 64 rows; 16,384 tokens hold 10 sequences of 1,536
    assert (actor.rows_most, actor.micro_batch, actor.micro_batches) == (
        64, "16384 tokens (at least 10 sequences)", 7,
    )  # fmt: skip


def test_prompts_that_do_not_divide_by_the_engines_are_named():
    algebra = batch_algebra(load_config(SPLIT, ["data.prompts_per_iteration=1022", "algorithm.num_mini_batches=7"]))
    assert "rollout: 1022 prompts do not divide by 4 engines; prompts that do: [1020, 1024]" in algebra.remarks


def test_a_source_with_its_own_group_size_is_said():
    algebra = batch_algebra(load_config("quickstart-grpo", ["data.sources.0.group_size=4"]))
    assert algebra.remarks[0].startswith("sources ['sorting'] have a group size of their own")


def test_near_divisors_and_multiples():
    assert divisors_near(96, 5) == [2, 3, 4, 6]
    assert divisors_near(7, 3) == [1, 7]
    assert multiples_near(6, 50) == [48, 54]
    assert multiples_near(8, 3) == [8]
