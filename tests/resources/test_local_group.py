"""Groups in this process answer calls as worker groups do."""

import pytest
import torch
from tensordict import TensorDict

from resources.batch import make_shard
from resources.dispatch import Dispatch, dispatch
from resources.local_group import LocalGroup, make_siblings
from resources.rows import Rows, ShardRef


class Adder:
    """Knows its rank from its constructor, since all share one environment."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @dispatch(Dispatch.BROADCAST)
    def add(self, number: int) -> int:
        return number + self.rank

    @dispatch(Dispatch.PER_RANK)
    def own(self, number: int) -> int:
        return number * 10 + self.rank

    @dispatch(Dispatch.RANK_ZERO)
    def first(self) -> int:
        return self.rank

    @dispatch(Dispatch.MESH, bulk=True, split=("rows",))
    def double(self, rows: TensorDict) -> tuple[dict, TensorDict]:
        return {"rank": self.rank}, make_shard({"row_ids": rows["row_ids"].clone(), "scores": rows["scores"] * 2})


@pytest.fixture
def group() -> LocalGroup:
    return LocalGroup("adder", [Adder(0), Adder(1)])


def stored(scores: list[float]) -> Rows:
    shard = make_shard({"row_ids": torch.arange(len(scores)), "scores": torch.tensor(scores)})
    return Rows([ShardRef(shard, tuple(range(len(scores))), ("row_ids", "scores"))], range(len(scores)))


def test_ranks_answer_in_order(group: LocalGroup):
    assert group.call("add", 5) == [5, 6]
    assert group.call("own", [1, 2]) == [10, 21]
    assert group.call("first") == 0
    assert (group.world_size, len(group.ranks)) == (2, 2)


def test_rows_are_cut_loaded_and_told_as_by_a_worker_process(group: LocalGroup):
    call = group.submit("double", stored([1.0, 2.0, 3.0]))
    (first, left), (second, right) = call.result()
    assert left["scores"].tolist() == [2.0, 4.0]
    assert right["scores"].tolist() == [6.0]
    assert first["shard"] == {"row_ids": [0, 1], "columns": ["row_ids", "scores"]}
    assert [span["rank"] for span in call.spans] == [0, 1]
    assert second["rank"] == 1


def test_an_unknown_method_is_named(group: LocalGroup):
    with pytest.raises(ValueError, match="role adder has no dispatched method 'fly'"):
        group.call("fly")


def test_siblings_reach_each_other(group: LocalGroup):
    workers = {"adder": group.workers[0], "other": Adder(7)}
    make_siblings(workers)
    assert workers["adder"].siblings["other"].rank == 7
