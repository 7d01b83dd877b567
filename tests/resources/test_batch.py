"""The rollout batch: ragged at rest, joined by row id and never by position."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from resources.batch import (
    BatchError,
    concat_rows,
    join_columns,
    make_shard,
    ragged_from_rows,
    row_lengths,
    select_rows,
    to_padded,
    to_ragged,
    validate,
)
from resources.rows import Rows, ShardRef


def shard(row_ids: list[int], **columns: torch.Tensor) -> TensorDict:
    return make_shard({"row_ids": torch.tensor(row_ids, dtype=torch.int64), **columns})


def tokens(*rows: list[int]) -> torch.Tensor:
    return ragged_from_rows([torch.tensor(row, dtype=torch.int64) for row in rows], torch.int64)


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=6))
def test_padding_and_back_is_the_identity(rows: list[list[int]]):
    ragged = tokens(*rows)
    again = to_ragged(to_padded(ragged), row_lengths(ragged))
    assert torch.equal(again.values(), ragged.values())
    assert torch.equal(again.offsets(), ragged.offsets())


def test_padding_never_cuts():
    with pytest.raises(BatchError, match="length is 2 but a row has 3 values"):
        to_padded(tokens([1, 2, 3]), length=2)


def test_rows_are_selected_by_id_in_the_order_asked():
    found = select_rows(shard([7, 8, 9], input_ids=tokens([1], [2, 2], [])), [9, 7])
    assert found["row_ids"].tolist() == [9, 7]
    assert to_padded(found["input_ids"]).tolist() == [[0], [1]]


def test_a_row_that_is_not_there_is_named():
    with pytest.raises(BatchError, match=r"row ids \[5\] are not in the shard"):
        select_rows(shard([7, 8]), [7, 5])


def test_columns_join_by_row_id_whatever_their_order():
    scores = shard([2, 1], scores=torch.tensor([0.2, 0.1]))
    joined = join_columns([shard([1, 2], input_ids=tokens([5], [6, 6])), scores])
    assert joined["scores"].tolist() == pytest.approx([0.1, 0.2])


def test_a_missing_row_in_one_column_is_refused():
    with pytest.raises(BatchError, match=r"row ids differ: missing \[2\]"):
        join_columns([shard([1, 2]), shard([1], scores=torch.tensor([0.0]))])


def test_a_row_id_that_stands_twice_is_refused():
    with pytest.raises(BatchError, match=r"row ids \[1\] stand more than once"):
        join_columns([shard([1, 1]), shard([1, 1])])


def test_a_column_with_two_writers_is_refused():
    one = shard([1], scores=torch.tensor([0.0]))
    with pytest.raises(BatchError, match="comes from two shards"):
        join_columns([one, one])


def test_uneven_shards_concatenate_in_order():
    whole = concat_rows([shard([1, 2], input_ids=tokens([1], [2, 2])), shard([3], input_ids=tokens([3, 3, 3]))])
    assert whole["row_ids"].tolist() == [1, 2, 3]
    assert row_lengths(whole["input_ids"]).tolist() == [1, 2, 3]


def test_shards_that_differ_in_columns_do_not_concatenate():
    with pytest.raises(BatchError, match="differ in columns"):
        concat_rows([shard([1]), shard([2], scores=torch.tensor([0.0]))])


def test_the_first_wrong_column_is_named_with_what_it_should_be():
    rows = shard([1], input_ids=tokens([1, 2]), scores=torch.tensor([1], dtype=torch.int64))
    with pytest.raises(BatchError, match=r"'scores' is torch\.int64; it should be torch\.float32"):
        validate(rows, [])


def test_a_token_column_must_have_the_lengths_of_the_tokens():
    rows = shard([1], input_ids=tokens([1, 2]), values=ragged_from_rows([torch.tensor([0.0])], torch.float32))
    with pytest.raises(BatchError, match=r"has row lengths \[1\]; input_ids has \[2\]"):
        validate(rows, [])


def test_loaded_rows_are_the_readers_own():
    """What lies in the store is shared memory: a write by one reader must not show in another."""
    stored = shard([1, 2], scores=torch.tensor([1.0, 2.0]))
    rows = Rows([ShardRef(stored, (1, 2), ("row_ids", "scores"))], [1, 2])
    rows.load()["scores"].add_(100)
    assert stored["scores"].tolist() == [1.0, 2.0]


def test_rows_join_columns_that_lie_in_differently_cut_shards():
    left = shard([1, 2, 3], input_ids=tokens([1], [2], [3]))
    parts = [shard([3], scores=torch.tensor([0.3])), shard([1, 2], scores=torch.tensor([0.1, 0.2]))]
    refs = [ShardRef(left, (1, 2, 3), ("row_ids", "input_ids"))]
    refs += [ShardRef(part, tuple(part["row_ids"].tolist()), ("row_ids", "scores")) for part in parts]
    loaded = Rows(refs, [3, 1]).load()
    assert loaded["scores"].tolist() == pytest.approx([0.3, 0.1])
    assert loaded["input_ids"].values().tolist() == [3, 1]


def test_a_column_nobody_made_is_named():
    rows = Rows([ShardRef(shard([1]), (1,), ("row_ids",))], [1])
    with pytest.raises(BatchError, match=r"columns \['values'\] are missing"):
        rows.load(("values",))


def test_no_rows_still_have_columns():
    empty = Rows([ShardRef(shard([1], scores=torch.tensor([0.5])), (1,), ("row_ids", "scores"))], []).load()
    assert empty["scores"].shape == (0,)


def test_a_rank_without_rows_still_gets_the_columns():
    rows = Rows([ShardRef(shard([1], scores=torch.tensor([0.5])), (1,), ("row_ids", "scores"))], [1])
    assert rows.select([]).load()["scores"].shape == (0,)
