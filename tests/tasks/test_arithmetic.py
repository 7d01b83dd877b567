"""A run that computes in bfloat16 on CPUs that have no instructions for it is told so, setting by setting."""

from pathlib import Path

import pytest
from prefect import flow

from configs.run import RunConfig
from resources.cpu_features import multiplies_bfloat16
from resources.run_directory import RunDirectory, read_lines
from tasks.arithmetic import slow_settings, tell_slow_arithmetic
from tasks.run_folder import open_directory
from tasks.session import open_session
from tests.tasks.local_cast import small_config

SPLIT = (
    "pools={learn: {bundles: 1}, engines: {bundles: 1}}",
    "roles={actor: {pool: learn}, reference: {pool: engines}, rollout: {pool: engines}, reward: {pool: learn}}",
    "algorithm.name=grpo", "algorithm.kl.coef=0.1", "sft=null",
)  # fmt: skip


def config_of(*overrides: str) -> RunConfig:
    return small_config(*SPLIT, *overrides)


def test_each_setting_names_the_pools_that_compute_by_it():
    config = config_of("model.dtype=bfloat16")
    assert slow_settings(config, {"learn", "engines"}) == {"model.dtype": ["engines", "learn"]}
    assert slow_settings(config, {"engines"}) == {"model.dtype": ["engines"]}
    assert slow_settings(config, set()) == {}


def test_an_engine_with_an_arithmetic_of_its_own_is_told_by_its_own_setting():
    sampling = config_of("rollout.dtype=bfloat16")
    assert slow_settings(sampling, {"learn", "engines"}) == {"rollout.dtype": ["engines"]}
    training = config_of("model.dtype=bfloat16", "rollout.dtype=float32", "algorithm.kl.coef=0.0")
    assert slow_settings(training, {"learn", "engines"}) == {"model.dtype": ["learn"]}


def test_float32_and_accelerators_are_told_nothing():
    assert slow_settings(config_of(), {"learn", "engines"}) == {}
    on_gpu = config_of("model.dtype=bfloat16", "pools.engines.accelerator=gpu", "pools.learn.accelerator=gpu")
    assert slow_settings(on_gpu, {"learn", "engines"}) == {}


def test_the_run_keeps_an_event_of_it_and_logs_the_way_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    directory = RunDirectory.create(tmp_path, "demo")
    hosts = {"learn": {"multiplies_bfloat16": True}, "engines": {"multiplies_bfloat16": False}}
    tell_slow_arithmetic(config_of("model.dtype=bfloat16"), directory, hosts)
    [event] = read_lines(directory.events)
    assert (event["kind"], event["setting"], event["pools"]) == ("slow-bfloat16", "model.dtype", ["engines"])
    assert "model.dtype is bfloat16, and the CPUs of pools engines have no instructions for it" in caplog.text
    assert "set model.dtype=float32" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_session", "ray_session")
def test_a_run_is_told_of_the_cpus_that_its_pools_are_on(tmp_path: Path):
    config = config_of(f"run_dir={tmp_path}", "name=told", "model.dtype=bfloat16")

    @flow
    def open_and_leave() -> None:
        own, directory = open_directory(config, None)
        with open_session(own, directory):
            pass
        directory.release()

    open_and_leave()
    told = [event for event in read_lines(tmp_path / "told" / "events.jsonl") if event["kind"] == "slow-bfloat16"]
    assert [event["pools"] for event in told] == ([] if multiplies_bfloat16() else [["engines", "learn"]])
