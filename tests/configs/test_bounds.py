"""Names, seeds, sizes and variables: what is out of any bound is refused at the config."""

import pytest

from configs.load import load_config
from tests.configs.test_rules import problems, the_problem


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a\\nb", "ü", "-a", "a" * 101])
def test_a_pool_is_named_as_processes_and_reservations_can_be(name: str):
    changes = [f'pools={{main: {{nodes: [1], cpus_per_bundle: 2}}, "{name}": {{nodes: [1]}}}}']
    assert "it must " in the_problem("quickstart", *changes, f'roles.reward={{pool: "{name}"}}')


@pytest.mark.parametrize("name", ["a" * 101, "über", "a b", "a/b", "..", "-a", "A"])
def test_a_run_is_named_as_a_folder_can_be(name: str):
    assert the_problem("quickstart", f"name='{name}'").startswith("name is '")


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
@pytest.mark.parametrize("path", ["seed", "data.seed", "data.sources.0.seed", "rollout.seed_offset"])
def test_a_seed_has_sixty_four_bits(path: str, seed: int):
    assert f"{path} is {seed}" in the_problem("quickstart", f"{path}={seed}")


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_any_seed_of_sixty_four_bits_will_do(seed: int):
    assert problems("quickstart", f"seed={seed}") == []


@pytest.mark.parametrize("size", ["nodes: [1000000000]", "bundles: 1000000000", "nodes: [16384, 1]"])
def test_a_pool_larger_than_anything_is_refused_at_once(size: str):
    assert "more than the 16384 that are planned" in the_problem("quickstart", f"pools.main={{{size}}}")


@pytest.mark.parametrize(
    "setting",
    ["rollout.group_size=9223372036854775808", "data.prompts_per_iteration=1000001", "iterations=99999999999999999"],
)
def test_counts_beyond_anything_are_refused_at_once(setting: str):
    said = the_problem("quickstart-grpo", setting)
    assert said.startswith(
        f"{setting.partition('=')[0]} is {setting.partition('=')[2]}; it must be less than or equal to 1000000"
    )


def test_more_workers_than_anything_has_are_refused_at_once():
    assert "roles.reward.workers is 1000000000" in the_problem("quickstart", "roles.reward.workers=1000000000")


def test_processes_beyond_the_slots_are_counted_by_role():
    said = the_problem("quickstart", "roles.reward.workers=1000")
    assert "bundle 0 holds 1002 processes" in said
    assert "'reward': 1000" in said


@pytest.mark.parametrize("share", ["0.00001", "0", "1.5", "-1"])
def test_a_share_of_an_accelerator_that_ray_cannot_count_is_refused(share: str):
    change = f"pools.main={{nodes: [1], accelerator: gpu, accelerators_per_bundle: {share}}}"
    assert "pools.main.accelerators_per_bundle is" in the_problem("quickstart", change)


def test_a_share_of_no_accelerator_is_refused():
    change = "pools.main={nodes: [1], accelerators_per_bundle: 0.5}"
    assert "accelerators_per_bundle is 0.5 but accelerator is none" in the_problem("quickstart", change)


@pytest.mark.parametrize("key", ["", "A B", "A=B", "A\\0", " RANK"])
def test_a_name_that_no_variable_can_have_is_refused(key: str):
    assert "neither '=' nor white space" in the_problem("quickstart", f'roles.actor.env={{"{key}": x}}')


def test_a_value_that_no_variable_can_have_is_refused():
    assert "holds a NUL" in the_problem("quickstart", 'roles.actor.env={A: "x\\0y"}')


@pytest.mark.parametrize("key", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CALLSHEET_CONTROLLER"])
def test_devices_and_marks_of_ours_are_not_set_by_a_role(key: str):
    assert "Callsheet sets this key" in the_problem("quickstart", f"roles.actor.env.{key}=x")


@pytest.mark.parametrize(
    ("size", "read"), [("80000000", 80_000_000), ("128MiB", 134_217_728), ("0.5 GiB", 536_870_912)]
)
def test_the_object_store_has_a_size_with_or_without_a_unit(size: str, read: int):
    assert load_config("quickstart", [f"ray.object_store_bytes={size}"]).ray.object_store_bytes == read


@pytest.mark.parametrize(
    ("size", "said"), [("79999999", " is 79999999;"), ("1MiB", " is '1MiB'"), ("many", ": 'many'")]
)
def test_an_object_store_that_ray_would_not_start_with_is_refused(size: str, said: str):
    assert the_problem("quickstart", f"ray.object_store_bytes={size}").startswith(f"ray.object_store_bytes{said}")


def test_fused_roles_set_a_variable_to_one_value():
    apart = ["roles.actor.env={A: '1', B: '1'}", "roles.critic.env={A: '2', B: '1'}"]
    assert the_problem("quickstart", *apart).startswith("roles.critic.env.A is '2'; it is fused with actor")


@pytest.mark.parametrize(
    "setting",
    [
        "recovery.call_deadline_seconds=0.5", "recovery.call_deadline_seconds=1e300",
        "recovery.stopped_after_seconds=1", "ray.connect_deadline_seconds=0.001", "actor.optimizer.lr=1e10",
        "actor.optimizer.eps=2", "actor.optimizer.weight_decay=11", "actor.optimizer.max_grad_norm=1e-300",
    ],
)  # fmt: skip
def test_a_number_that_can_only_be_a_slip_is_refused(setting: str):
    said = the_problem("quickstart", setting)
    assert said.startswith(f"{setting.partition('=')[0]} is ")
    assert "it must be" in said
