"""The memory of an accelerator: as its node tells it, by its type, or not at all."""

import pytest

from configs.pools import PoolConfig
from resources.bundle_memory import least_accelerator_bytes
from resources.node_resources import parse_nodes

GIB = 2**30
TOLD, TYPED, SILENT = parse_nodes("(cpu=8,gpu=8,vram=24GiB) + (cpu=8,gpu=8,type=H100) + (cpu=8,gpu=8)")


def pool(**settings: object) -> PoolConfig:
    return PoolConfig(bundles=1, accelerator="gpu", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "node", "known"),
    [
        ({}, TOLD, 24 * GIB),
        ({}, TYPED, 80 * GIB),
        ({"accelerator_type": "L4"}, SILENT, 24 * GIB),
        ({"accelerators_per_bundle": 0.5}, TYPED, 40 * GIB),
        ({}, SILENT, 0),
        ({}, None, 0),
    ],
)
def test_the_memory_behind_a_bundle_is_what_its_node_or_its_type_tells(settings: dict, node: object, known: int):
    assert least_accelerator_bytes({"a": pool(**settings)}, {"a": [node]}) == known  # type: ignore[list-item]


def test_the_smallest_bundle_counts_and_one_that_is_unknown_leaves_all_unknown():
    pools = {"a": pool(), "cpus": PoolConfig(bundles=1)}
    assert least_accelerator_bytes(pools, {"a": [TYPED, TOLD], "cpus": [SILENT]}) == 24 * GIB
    assert least_accelerator_bytes(pools, {"a": [TYPED, SILENT], "cpus": [SILENT]}) == 0
    assert least_accelerator_bytes({"cpus": PoolConfig(bundles=1)}, {"cpus": [SILENT]}) == 0
