"""Tensors on disk: whatever the sharding was when saved, what is loaded is the same bits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from resources.tensor_files import Box, TensorFileError, load_scalars, load_tensors, save_tensors


def test_plain_tensors_come_back_bit_for_bit(tmp_path: Path):
    saved = {"w": torch.randn(3, 4), "step": torch.tensor(7.0), "empty": torch.empty(0)}
    save_tensors(tmp_path, 0, saved, {"lr": 0.1})
    loaded = {"w": torch.zeros(3, 4), "step": torch.tensor(0.0)}
    load_tensors(tmp_path, loaded, 0)
    assert torch.equal(loaded["w"], saved["w"])
    assert loaded["step"] == 7.0
    assert load_scalars(tmp_path, 0) == {"lr": 0.1}


def test_two_names_for_one_memory_are_both_stored(tmp_path: Path):
    weight = torch.arange(6.0)
    save_tensors(tmp_path, 0, {"embed": weight, "head": weight}, {})
    loaded = {"embed": torch.zeros(6), "head": torch.zeros(6)}
    load_tensors(tmp_path, loaded, 0)
    assert torch.equal(loaded["head"], weight)


def test_another_shape_is_refused_with_both_shapes(tmp_path: Path):
    save_tensors(tmp_path, 0, {"w": torch.zeros(3)}, {})
    with pytest.raises(TensorFileError, match=r"'w' has shape \(4,\); the checkpoint has \(3,\)"):
        load_tensors(tmp_path, {"w": torch.zeros(4)}, 0)


def test_a_missing_tensor_is_named(tmp_path: Path):
    save_tensors(tmp_path, 0, {"w": torch.zeros(3)}, {})
    with pytest.raises(TensorFileError, match="'v' is not in"):
        load_tensors(tmp_path, {"v": torch.zeros(3)}, 0)


def test_ranks_keep_their_own_generator_state(tmp_path: Path):
    for rank in (0, 1):
        save_tensors(tmp_path, rank, {"rank.rng": torch.full((2,), float(rank))}, {})
    loaded = {"rank.rng": torch.zeros(2)}
    load_tensors(tmp_path, loaded, 1)
    assert loaded["rank.rng"].tolist() == [1.0, 1.0]


def test_overlap_of_boxes_that_only_touch_is_none():
    assert Box((0, 0), (2, 2)).overlap(Box((2, 0), (2, 2))) is None


def test_of_several_copies_one_is_read(tmp_path: Path):
    """As replicated ranks once wrote them."""
    save_tensors(tmp_path, 0, {"w": torch.arange(6.0)}, {})
    shutil.copy(tmp_path / "rank-00000.json", tmp_path / "rank-00001.json")
    loaded = {"w": torch.zeros(6)}
    load_tensors(tmp_path, loaded, 1)
    assert loaded["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_two_copies_of_one_half_are_not_taken_for_the_whole(tmp_path: Path):
    save_tensors(tmp_path, 0, {"w": torch.arange(3.0)}, {})
    index = json.loads((tmp_path / "rank-00000.json").read_text())
    index["boxes"]["w"]["whole"] = [6]
    for rank in (0, 1):
        (tmp_path / f"rank-0000{rank}.json").write_text(json.dumps(index))
    shutil.copy(tmp_path / "rank-00000.safetensors", tmp_path / "rank-00001.safetensors")
    with pytest.raises(TensorFileError, match="'w': 3 of 6 values found"):
        load_tensors(tmp_path, {"w": torch.zeros(6)}, 0)


def _save_replicated(rank: int, world: int, folder: str, port: int) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(4 * 3, dtype=torch.float32).reshape(4, 3)
    layouts = {"both": (Replicate(), Replicate()), "rows": (Replicate(), Shard(0)), "columns": (Shard(1), Replicate())}
    saved = {name: distribute_tensor(whole, mesh, layout) for name, layout in layouts.items()}
    save_tensors(Path(folder), rank, saved, {})
    torch.distributed.barrier()
    loaded = {name: distribute_tensor(torch.zeros(4, 3), mesh, layout) for name, layout in layouts.items()}
    load_tensors(Path(folder), loaded, rank)
    assert all(torch.equal(loaded[name].to_local(), saved[name].to_local()) for name in layouts)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_of_ranks_that_hold_the_same_piece_one_writes_it(tmp_path: Path, free_port: int):
    """Ranks 0 and 1 are the first replica along the mesh's first axis, 0 and 2 along its second."""
    torch.multiprocessing.spawn(_save_replicated, args=(4, str(tmp_path), free_port), nprocs=4)
    written = [json.loads((tmp_path / f"rank-0000{rank}.json").read_text())["boxes"] for rank in range(4)]
    assert [sorted(boxes) for boxes in written] == [["both", "columns", "rows"], ["rows"], ["columns"], []]
    loaded = {name: torch.zeros(4, 3) for name in ("both", "rows", "columns")}
    load_tensors(tmp_path, loaded, 0)
    assert all(tensor.flatten().tolist() == list(range(12)) for tensor in loaded.values())


def _save_sharded(rank: int, world: int, folder: str, port: int) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(5 * 3, dtype=torch.float32).reshape(5, 3)
    save_tensors(Path(folder), rank, {"w": distribute_tensor(whole, mesh, [Shard(0)])}, {"rank": rank})
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_tensor_saved_by_two_ranks_loads_into_one_process(tmp_path: Path, free_port: int):
    torch.multiprocessing.spawn(_save_sharded, args=(2, str(tmp_path), free_port), nprocs=2)
    loaded = {"w": torch.zeros(5, 3)}
    load_tensors(tmp_path, loaded, 0)
    assert loaded["w"].flatten().tolist() == list(range(15))


@pytest.mark.slow
def test_a_lost_rank_file_is_noticed(tmp_path: Path, free_port: int):
    torch.multiprocessing.spawn(_save_sharded, args=(2, str(tmp_path), free_port), nprocs=2)
    (tmp_path / "rank-00001.json").unlink()
    with pytest.raises(TensorFileError, match="9 of 15 values"):
        load_tensors(tmp_path, {"w": torch.zeros(5, 3)}, 0)
