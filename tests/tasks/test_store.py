"""The batch table: whole columns, one writer, gone after the last reader."""

import pytest
import torch

from resources.batch import make_shard
from resources.rows import ShardRef
from resources.store import BatchHandle, BatchStore, StoreError, StoreView


def shard(row_ids: list[int], *columns: str) -> ShardRef:
    values = {name: torch.tensor([float(row) for row in row_ids]) for name in columns}
    data = make_shard({"row_ids": torch.tensor(row_ids), **values})
    return ShardRef(data, tuple(row_ids), ("row_ids", *columns))


def test_a_handle_survives_json():
    handle = BatchHandle(pool="gpu", batch_id="0007-2")
    assert handle.to_json() == {"pool": "gpu", "batch_id": "0007-2"}
    assert BatchHandle.from_json(handle.to_json()) == handle


def test_columns_of_two_shards_come_back_joined_by_row_id():
    store = BatchStore("main")
    handle = store.add("b", [shard([3, 1], "scores"), shard([2], "scores")])
    store.add("b", [shard([1, 2, 3], "values")])
    rows = StoreView(store).rows([handle], ["scores", "values"])
    assert rows.row_ids == (1, 2, 3)
    loaded = rows.load()
    assert loaded["scores"].tolist() == [1.0, 2.0, 3.0]
    assert loaded["values"].tolist() == [1.0, 2.0, 3.0]


def test_a_column_has_one_writer():
    store = BatchStore("main")
    store.add("b", [shard([1], "scores")])
    with pytest.raises(StoreError, match="column 'scores' of batch 'b' is in pool 'main' already"):
        store.add("b", [shard([1], "scores")])


def test_a_column_with_other_rows_is_refused_naming_them():
    store = BatchStore("main")
    store.add("b", [shard([1, 2], "scores")])
    with pytest.raises(StoreError, match=r"column 'values' of batch 'b' lacks rows \[2\] and has unknown rows \[5\]"):
        store.add("b", [shard([1, 5], "values")])


def test_a_row_in_two_shards_of_a_column_is_refused():
    with pytest.raises(StoreError, match=r"rows \[1\] of column 'scores'"):
        BatchStore("main").add("b", [shard([1], "scores"), shard([1], "scores")])


def test_a_column_goes_with_its_last_reader_and_not_before():
    store = BatchStore("main", {"scores": ["advantage", "report"], "values": ["advantage"]})
    store.add("b", [shard([1], "scores")])
    store.add("b", [shard([1], "values")])
    store.release("b", "advantage")
    assert store.columns("b") == ("scores",)
    store.release("b", "advantage")
    assert store.columns("b") == ("scores",)
    store.release("b", "report")
    assert store.batch_ids() == ()


def test_a_shard_stays_while_one_of_its_columns_is_read():
    store = BatchStore("main", {"scores": ["advantage"], "values": ["update"]})
    store.add("b", [shard([1], "scores", "values")])
    store.release("b", "advantage")
    assert len(store.shards("b", ["values"])) == 1


def test_a_column_nobody_reads_stays_until_the_batch_is_dropped():
    store = BatchStore("main", {"scores": ["advantage"]})
    store.add("b", [shard([1], "scores", "entropy")])
    store.release("b", "advantage")
    assert store.columns("b") == ("entropy",)
    store.drop("b")
    assert store.batch_ids() == ()


def test_a_missing_column_is_named_with_those_there_are():
    store = BatchStore("main")
    handle = store.add("b", [shard([1], "scores")])
    with pytest.raises(
        StoreError,
        match=r"columns \['values'\] of batch 'b' are in none of the pools \['main'\], which hold \['scores'\]",
    ):
        StoreView(store).rows([handle], ["values"])


def test_a_batch_of_an_earlier_host_is_refused_with_the_reason():
    with pytest.raises(StoreError, match="incarnation 2 of its task host"):
        BatchStore("main", incarnation=2).row_ids("b")


def test_handles_of_two_batches_are_refused():
    store = BatchStore("main")
    handles = [store.add(name, [shard([1], "scores")]) for name in ("a", "b")]
    with pytest.raises(StoreError, match="a step reads exactly one batch"):
        StoreView(store).rows(handles, ["scores"])


def test_a_pool_without_a_host_is_named():
    view = StoreView(BatchStore("main"))
    with pytest.raises(StoreError, match="pool 'gone' has no task host"):
        view.rows([BatchHandle(pool="gone", batch_id="b")], ["scores"])
