"""A run whose rollouts go through servers: the same rows as without, and every token with its version."""

from collections.abc import Iterator

import pytest
import torch

from configs.layout import process_groups
from configs.problems import ConfigError
from configs.run import RunConfig
from resources.rows import Rows
from tasks.dynamic_sampling import rows_of, sample
from tasks.host import use_host
from tests.tasks.local_cast import small_config
from tests.tasks.local_run import LocalRun, cast_here

SERVED = (
    "rollout.servers.enabled=true",
    "pools={main: {nodes: [1], cpus_per_bundle: 2}, engines: {nodes: [2]}}",
    "roles.rollout={pool: engines, workers: 2}",
    "algorithm.name=grpo",
    "algorithm.kl.coef=0.0",
    "pools.main.cpus_per_bundle=2",
)


@pytest.fixture(scope="module")
def served() -> Iterator[LocalRun]:
    config = small_config(*SERVED)
    groups = cast_here(config)
    run = LocalRun(config, groups)
    run.sync()
    yield run
    if run.context.served is not None:
        run.context.served[1].shutdown()
    groups["reward"].call("close")


def rows(run: LocalRun) -> dict[int, list[int]]:
    with use_host(run.context):
        replies = sample(0, 0, 8, 0, None, [])  # pyright: ignore[reportArgumentType]
    ids = [row for shard in replies.shards for row in shard.row_ids]
    loaded = Rows(replies.shards, sorted(ids)).load()
    assert loaded["row_ids"].tolist() == sorted(ids)
    return {row: tokens.tolist() for row, tokens in zip(sorted(ids), loaded["input_ids"].unbind(), strict=True)}


def test_each_replica_is_a_group_of_its_own_in_the_plan() -> None:
    groups = {group.name: group.bundles for group in process_groups(small_config(*SERVED))}
    assert {name: bundles for name, bundles in groups.items() if name.startswith("rollout")} == {
        "rollout.0": (0,),
        "rollout.1": (1,),
    }


def test_servers_give_the_rows_that_one_engine_gives(served: LocalRun) -> None:
    """Seeds belong to rows, so which replica samples one does not show."""
    alone_config: RunConfig = small_config("algorithm.name=grpo", "algorithm.kl.coef=0.0")
    alone = LocalRun(alone_config, cast_here(alone_config))
    assert rows(served) == rows(alone)
    alone.context.groups["reward"].call("close")


def test_an_iteration_trains_on_served_rows_and_the_next_has_the_new_version(served: LocalRun) -> None:
    first, second = served.iterate(), served.iterate()
    assert first["actor/optimizer_steps"] == 4  # two PPO epochs of two mini-batches
    assert second["actor/optimizer_steps"] == 4
    engines = [served.context.groups[name].workers[0].engine for name in ("rollout.0", "rollout.1")]
    assert [engine.policy_version for engine in engines] == [served.state.policy_version] * 2
    with use_host(served.context):
        replies = sample(0, 0, 2, 5, served.state.policy_version, [])
    shard = rows_of(replies).load()
    versions, mask = shard["token_versions"].values(), shard["response_mask"].values()
    assert torch.equal(versions[mask], torch.full_like(versions[mask], served.state.policy_version))
    assert set(versions[~mask].tolist()) == {-1}


def test_engines_of_two_versions_are_refused(served: LocalRun) -> None:
    engine = served.context.groups["rollout.1"].workers[0].engine
    engine.policy_version += 1
    with use_host(served.context), pytest.raises(RuntimeError, match="hold policy versions"):
        sample(0, 0, 2, 0, None, [])  # pyright: ignore[reportArgumentType]
    engine.policy_version -= 1


def test_servers_inside_the_actors_process_are_refused() -> None:
    with pytest.raises(ConfigError, match="fused with other roles, and each server is a process of its own"):
        small_config("rollout.servers.enabled=true")
