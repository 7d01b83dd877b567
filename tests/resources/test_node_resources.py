"""Nodes as a person writes them, and as this machine is."""

from pathlib import Path

import pytest

from resources.node_resources import ACCELERATOR_MEMORY_LABEL, count_gpus, parse_nodes, this_machine


def test_groups_of_nodes_are_read():
    first, second, third = parse_nodes(
        "2x(gpu=8, cpu=96, mem=900GiB, type=H100, vram=80GiB) + (cpu=32,NPU=4,licence=1)"
    )
    assert first.total == {"GPU": 8.0, "CPU": 96.0, "memory": 900 * 2**30}
    assert (first.accelerator_type, first.labels[ACCELERATOR_MEMORY_LABEL]) == ("H100", str(80 * 2**30))
    assert third.total == {"CPU": 32.0, "NPU": 4.0, "licence": 1.0}
    assert [node.ip for node in (first, second, third)] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_three_hundred_nodes_have_addresses_of_their_own():
    assert parse_nodes("300x(cpu=1)")[299].ip == "10.0.1.44"


@pytest.mark.parametrize(
    "text",
    [
        "", "8", "2x", "2x()", "0x(cpu=1)", "(cpu=0)", "(cpu=-1)", "(cpu=x)", "(gpu=8)", "(cpu=1", "(cpu=1,cpu=2)",
        "(cpu)", "(cpu=)", "(cpu=inf)", "(cpu=nan)", "(cpu=1,mem=3XB)", "(cpu=1)(cpu=2)x", "two x (cpu=1)",
        "(cpu=1,gpu=8.5)", "(cpu=1,mem=64)", "(cpu=1,gpu=1,vram=80)", "(cpu=1,gpu=1,vram=80GB)",
    ],
)  # fmt: skip
def test_what_is_no_list_of_nodes_is_refused(text: str):
    with pytest.raises(ValueError, match="--nodes"):
        parse_nodes(text)


def test_a_memory_without_its_unit_is_told_as_what_it_would_be():
    with pytest.raises(ValueError, match=r"holds vram=80, which is 80 bytes; write for example vram=80GiB"):
        parse_nodes("(cpu=1,gpu=1,vram=80)")
    [node] = parse_nodes("(cpu=1,mem=68719476736)")
    assert node.total["memory"] == 64 * 2**30


def test_this_machine_has_cpus_and_memory():
    machine = this_machine()
    assert machine.total["CPU"] >= 1
    assert machine.total["memory"] > 2**20


def test_this_machine_takes_the_sizes_of_a_local_cluster():
    assert this_machine(num_cpus=12, num_gpus=3).total | {"memory": 0} == {"CPU": 12.0, "GPU": 3.0, "memory": 0}


def test_gpus_are_counted_by_their_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert count_gpus(tmp_path) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus(tmp_path) == 0


@pytest.mark.parametrize("text", ["0x(cpu=4)", "100000000x(cpu=4)", "9" * 5000 + "x(cpu=1)"])
def test_a_group_has_as_many_nodes_as_a_cluster_can(text: str):
    with pytest.raises(ValueError, match="a group has 1 to 16384 nodes"):
        parse_nodes(text)


@pytest.mark.parametrize("text", ["(cpu=4,type=A,type=B)", "(cpu=4,vram=80GiB,vram=40GiB)", "(cpu=4,CPU=4)"])
def test_a_word_that_stands_twice_in_a_group_is_refused(text: str):
    with pytest.raises(ValueError, match="twice in one group"):
        parse_nodes(text)
