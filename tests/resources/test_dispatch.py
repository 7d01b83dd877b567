"""Splitting and joining, without any process."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from resources.batch import to_ragged
from resources.call_plan import join_answers, plan_call
from resources.dispatch import Dispatch, Topology, dispatch, marked_methods
from resources.ranks import Mesh
from resources.splitting import join_rows, split_rows, split_sizes
from tests.resources.sample_workers import EchoWorker

METHODS = marked_methods(EchoWorker)


def plan(
    method: str, world: int, *args: Any, mesh: Mesh | None = None, shared: list[Any] | None = None, **kwargs: Any
) -> Any:
    """The plan of a call; values given to several ranks are collected in `shared`."""
    topology = Topology(role="echo", world_size=world, mesh=mesh or Mesh())
    seen = [] if shared is None else shared

    def share(value: Any) -> Any:
        seen.append(value)
        return value

    return plan_call(METHODS[method], topology, args, kwargs, share)


def test_a_marked_method_stays_a_plain_callable() -> None:
    class Worker:
        @dispatch(Dispatch.RANK_ZERO)
        def double(self, x: int) -> int:
            return 2 * x

    assert Worker().double(4) == 8


def test_an_override_without_a_mark_keeps_its_parents() -> None:
    class Child(EchoWorker):
        def who(self) -> int:
            return -1

    assert marked_methods(Child)["who"].marking.mode is Dispatch.RANK_ZERO


def test_rows_are_split_unevenly_in_order_and_other_arguments_are_sent_whole() -> None:
    rows = [1, 2, 3, 4, 5]
    made = plan("shift", 3, rows, by=10)
    assert made.arguments == [(([1, 2],), {"by": 10}), (([3, 4],), {"by": 10}), (([5],), {"by": 10})]
    assert rows == [1, 2, 3, 4, 5]


def test_keyword_rows_are_split_like_positional_ones() -> None:
    assert [kwargs["xs"] for _, kwargs in plan("shift", 2, xs=[1, 2, 3]).arguments] == [[1, 2], [3]]


def test_fewer_rows_than_ranks_give_empty_shares() -> None:
    assert [args[0] for args, _ in plan("shift", 3, [7]).arguments] == [[7], [], []]


def test_per_rank_arguments_of_the_wrong_length_name_role_method_and_argument() -> None:
    with pytest.raises(ValueError, match=r"echo\.own: argument value has 3 entries and the group has 2 ranks"):
        plan("own", 2, [1, 2, 3])


def test_a_per_rank_argument_that_is_no_list_is_refused() -> None:
    with pytest.raises(ValueError, match=r"echo\.own: argument value is a int; per-rank arguments are lists of 2"):
        plan("own", 2, 5)


def test_a_missing_argument_names_role_and_method() -> None:
    with pytest.raises(ValueError, match=r"echo\.shift: missing a required argument: 'xs'"):
        plan("shift", 2)


def test_an_unknown_keyword_names_role_and_method() -> None:
    with pytest.raises(ValueError, match=r"echo\.shift: got an unexpected keyword argument 'bye'"):
        plan("shift", 2, [1], bye=2)


def test_split_arguments_with_different_row_counts_are_refused() -> None:
    class Worker:
        @dispatch(Dispatch.SPLIT_ROWS)
        def pair(self, left: list[int], right: list[int]) -> None: ...

    topology = Topology(role="echo", world_size=2)
    with pytest.raises(ValueError, match=r"echo\.pair: .* different numbers of rows: \{'left': 2, 'right': 3\}"):
        plan_call(marked_methods(Worker)["pair"], topology, ([1, 2], [1, 2, 3]), {}, lambda value: value)


def test_an_argument_named_in_split_that_has_no_rows_is_refused() -> None:
    class Worker:
        @dispatch(Dispatch.SPLIT_ROWS, split=("rows",))
        def score(self, rows: list[int], names: list[str]) -> None: ...

    info = marked_methods(Worker)["score"]
    topology = Topology(role="echo", world_size=2)
    assert plan_call(info, topology, ([1, 2], ["a"]), {}, lambda value: value).arguments == [
        (([1], ["a"]), {}),
        (([2], ["a"]), {}),
    ]
    with pytest.raises(ValueError, match=r"echo\.score: argument rows cannot be split by rows: a int has no rows"):
        plan_call(info, topology, (3, ["a"]), {}, lambda value: value)


def test_on_a_mesh_each_chunk_is_shared_once_and_reaches_every_peer() -> None:
    shared: list[Any] = []
    rows = list(range(40))
    made = plan("on_mesh", 4, rows, mesh=Mesh(tp=2), shared=shared)
    assert [args[0] for args, _ in made.arguments] == [rows[:20], rows[:20], rows[20:], rows[20:]]
    assert shared == [rows[:20], rows[20:]]
    assert made.answering == [True, False, True, False]


def test_a_large_broadcast_argument_is_shared_once_and_a_small_one_is_not() -> None:
    shared: list[Any] = []
    plan("environment", 4, ["A"], shared=shared)
    assert shared == []
    plan("environment", 4, list(range(1000)), shared=shared)
    assert len(shared) == 1


def test_metrics_are_reduced_as_declared_and_never_by_their_name() -> None:
    topology = Topology(role="echo", world_size=2)
    answers = [
        {"loss": 1.0, "rate": 1.0, "time/step": 1.0, "low": 5.0},
        {"loss": 2.0, "rate": 3.0, "time/step": 4.0, "low": 2.0},
    ]
    assert join_answers(METHODS["measure"], topology, answers) == {
        "loss": 3.0,
        "rate": 2.0,
        "time/step": 4.0,
        "low": 2.0,
    }


def test_the_arguments_of_a_metrics_method_are_split_as_scatter_says() -> None:
    class Worker:
        @dispatch(Dispatch.METRICS, reduce={"count": "sum"}, scatter=Dispatch.SPLIT_ROWS)
        def count(self, rows: list[int]) -> dict[str, float]:
            return {"count": float(len(rows))}

    info, topology = marked_methods(Worker)["count"], Topology(role="echo", world_size=2)
    made = plan_call(info, topology, ([7, 8, 9],), {}, lambda value: value)
    assert made.arguments == [(([7, 8],), {}), (([9],), {})]
    answers = [Worker().count(*args) for args, _ in made.arguments]
    assert join_answers(info, topology, answers) == {"count": 3.0}


def test_an_undeclared_metric_is_named() -> None:
    topology = Topology(role="echo", world_size=1)
    with pytest.raises(ValueError, match=r"echo\.measure_undeclared: metric 'mystery' has no declared reduction"):
        join_answers(METHODS["measure_undeclared"], topology, [{"loss": 1.0, "mystery": 2.0}])


def test_metrics_without_a_reduction_are_refused_when_marked() -> None:
    with pytest.raises(ValueError, match="metrics need reduce="):
        dispatch(Dispatch.METRICS)
    with pytest.raises(ValueError, match="reduce names 'median'"):
        dispatch(Dispatch.METRICS, reduce={"loss": "median"})  # type: ignore[dict-item]


def test_an_own_split_must_give_one_argument_set_per_rank() -> None:
    topology = Topology(role="echo", world_size=3)
    assert plan("times_rank", 3, 5).arguments == [((0,), {}), ((5,), {}), ((10,), {})]
    assert join_answers(METHODS["times_rank"], topology, [0, 5, 10]) == 15


@given(rows=st.integers(0, 50), parts=st.integers(1, 9))
def test_split_sizes_differ_by_at_most_one_and_add_up(rows: int, parts: int) -> None:
    sizes = split_sizes(rows, parts)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1


@given(rows=st.integers(1, 12), parts=st.integers(1, 5))
def test_joining_what_was_split_gives_the_rows_back(rows: int, parts: int) -> None:
    lengths = torch.arange(rows) % 3 + 1
    padded = torch.arange(rows * 3).reshape(rows, 3)
    shard = TensorDict({"row_ids": torch.arange(rows), "input_ids": to_ragged(padded, lengths)}, batch_size=[rows])
    columns = {"x": np.arange(rows), "y": torch.arange(rows)}
    sizes = split_sizes(rows, parts)
    again = join_rows(split_rows(shard, sizes))
    assert torch.equal(again["row_ids"], shard["row_ids"])
    assert torch.equal(again.get("input_ids").values(), shard.get("input_ids").values())
    assert torch.equal(again.get("input_ids").offsets(), shard.get("input_ids").offsets())
    joined = join_rows(split_rows(columns, sizes))
    assert np.array_equal(joined["x"], columns["x"])
    assert torch.equal(joined["y"], columns["y"])
