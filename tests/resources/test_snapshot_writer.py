"""A snapshot written beside the run is the checkpoint that the role itself would have written."""

import os
from pathlib import Path

import pytest
import ray
import torch

from resources.snapshot_writer import SnapshotWriters, write_snapshot
from resources.tensor_files import NotFiniteError, file_checksum, load_tensors, pieces_of, save_tensors

TENSORS = {"model.w": torch.arange(12.0).reshape(3, 4), "rank.rng": torch.arange(5, dtype=torch.uint8)}


def kept(tensors: dict[str, torch.Tensor]) -> dict:
    pieces = pieces_of(0, tensors, {"steps": 3})
    return {"tensors": dict(pieces.tensors), "boxes": dict(pieces.boxes), "scalars": dict(pieces.scalars)}


def test_both_ways_of_saving_give_the_same_files(tmp_path: Path):
    direct = save_tensors(tmp_path / "direct", 0, TENSORS, {"steps": 3})
    assert write_snapshot(tmp_path / "beside", 0, kept(TENSORS)) == direct
    for name, checksum in direct.items():
        assert file_checksum(tmp_path / "beside" / name) == checksum


def test_a_nan_is_never_written(tmp_path: Path):
    with pytest.raises(NotFiniteError, match=r"model\.w"):
        write_snapshot(tmp_path, 0, kept({"model.w": torch.tensor([1.0, float("nan")])}))
    assert not list(tmp_path.iterdir())


def test_a_sum_that_overflows_is_no_nan(tmp_path: Path):
    save_tensors(tmp_path, 0, {"w": torch.full((4,), 3e38)}, {})
    loaded = {"w": torch.zeros(4)}
    load_tensors(tmp_path, loaded, 0)
    assert loaded["w"].tolist() == [pytest.approx(3e38)] * 4


@pytest.mark.slow
def test_a_writer_process_tells_checksums_and_a_disk_that_says_no(cluster, tmp_path: Path):
    writers = SnapshotWriters(cluster.run_id, {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"})
    node = ray.get_runtime_context().get_node_id()
    piece = ray.put(kept(TENSORS))
    assert set(ray.get(writers.write(node, str(tmp_path / "a"), 0, piece))) == {
        "rank-00000.safetensors",
        "rank-00000.json",
    }
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        ray.get(writers.write(node, str(tmp_path / "file" / "b"), 0, piece))
    writers.stop()
    assert os.listdir(tmp_path / "a")
