"""Graders built from a configuration: names are checked, keys are masked, and every kind can be sent to a worker."""

import pickle
from typing import Any

import pytest

from configs import batch_rules
from configs.load import load_config
from configs.problems import ConfigError
from configs.reward import RULES, GraderConfig, JudgeConfig
from configs.run import RunConfig
from resources import graders
from resources.code_grader import CodeSettings
from resources.engines.base import FinishReason
from resources.graders import FINISH_REASONS, Grader
from resources.judge import HttpSettings, JudgeSettings
from tasks.algorithms import diagnostics, kl
from tasks.graders_of import build_graders, check_grader_options, check_graders
from tasks.rewards.table import GRADERS

KEY = "sk-very-secret"


def build(secrets: dict[str, str] | None = None, **fields: Any) -> Grader:
    grader = GraderConfig(name="g", **fields)
    config = RunConfig.model_validate(
        {
            "name": "run",
            "iterations": 1,
            "model": {"path": "/model"},
            "data": {"sources": [{"name": "s", "kind": "sorting", "size": 64}]},
            "rollout": {"max_response_length": 32, "group_size": 2},
            "reward": {"graders": [grader]},
            "algorithm": {"name": "grpo"},
            "pools": {"main": {"nodes": [1]}},
            "roles": {
                "actor": {"pool": "main"}, "rollout": {"pool": "main"}, "reward": {"pool": "main"},
                "reference": {"pool": "main"},
            },
        }
    )  # fmt: skip
    [built] = build_graders(config, secrets)
    assert repr(pickle.loads(pickle.dumps(built))) == repr(built)
    return built


def test_a_rule_becomes_an_import_path_with_its_options():
    built = build(function="exact_answer", weight=0.5)
    assert (built.function, built.weight) == ("tasks.rewards.exact_answer:exact_answer", 0.5)


def test_an_unknown_rule_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"grader 'g' names rule 'exact'; the rules are .*'exact_answer'"):
        build(function="exact")


def test_the_over_long_penalty_takes_the_length_limit_of_the_rollout():
    assert build(function="overlong_penalty", options={"buffer": 8}).options == {"buffer": 8, "max_length": 32}
    with pytest.raises(ValueError, match="has no option buffer, without which the penalty is always 0"):
        build(function="overlong_penalty")


def test_a_score_of_an_environment_needs_one():
    with pytest.raises(ValueError, match="reads the score of an environment, and there is none"):
        build(function="environment_score")


def test_the_verifier_of_mathematics_is_imported_before_its_time_counts():
    built = build(function="math_answer", timeout_seconds=2.0)
    assert (built.timeout_seconds, built.modules) == (2.0, ("math_verify",))


def test_a_judge_has_its_key_from_the_environment_masked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = JudgeConfig(base_url="http://judge/v1", model="m", api_key_env="JUDGE_KEY", requests_per_minute=60)
    built = build(kind="judge", judge=judge, options={"high": 10.0})
    assert isinstance(built.backend, JudgeSettings)
    assert built.backend.key is not None
    assert (built.backend.key.reveal(), built.backend.high, built.backend.requests_per_minute) == (KEY, 10.0, 60)
    assert KEY not in repr(built)


def test_a_key_that_is_not_set_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = JudgeConfig(base_url="http://judge/v1", model="m", api_key_env="JUDGE_KEY")
    with pytest.raises(ValueError, match="takes its key from JUDGE_KEY, which is not set"):
        build(kind="judge", judge=judge)


def test_a_key_can_come_from_a_secret_block():
    judge = JudgeConfig(base_url="http://judge/v1", model="m", api_key_block="judge-key")
    built = build({"judge-key": KEY}, kind="judge", judge=judge)
    assert built.backend.key.reveal() == KEY


def test_services_and_code_take_their_options_and_refuse_others():
    assert build(kind="http", url="http://service", options={"max_concurrency": 4}).backend == HttpSettings(
        url="http://service", max_concurrency=4
    )
    code = build(kind="sandbox", options={"partial": True, "memory_bytes": 1 << 28}, timeout_seconds=3.0).backend
    assert isinstance(code, CodeSettings)
    assert (code.limits.wall_seconds, code.limits.memory_bytes, code.runs_all, code.is_unsafe) == (
        3.0,
        1 << 28,
        True,
        False,
    )
    with pytest.raises(ValueError, match="code grader 'g' has no option 'network'"):
        build(kind="sandbox", options={"network": True})


def checked(*graders: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_graders(load_config("quickstart", [f"reward.graders=[{', '.join(graders)}]"]))
    return str(caught.value)


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        ("function: exact_answer, options: {ignore_cas: true}", "no option 'ignore_cas'; it takes ['ignore_case']"),
        ("function: numeric_answer, options: {tolerance: 1}", "no option 'tolerance'; it takes []"),
        ("function: response_format, options: {pattern: '('}", "pattern '(', which is no regular expression"),
        ("function: overlong_penalty, options: {max_length: 3, buffer: 9}", "over-long buffer is 9 and max_length 3"),
        (
            "function: overlong_penalty, options: {max_length: 3}",
            "has no option buffer, without which the penalty is always 0",
        ),
        ("kind: sandbox, options: {wall_second: 1}", "no option 'wall_second'"),
        ("kind: sandbox, options: {wall_seconds: 0}", "wall_seconds 0; a limit is a number above 0"),
        ("kind: sandbox, options: {memory_bytes: -1}", "memory_bytes -1; a limit is a number above 0"),
        ("kind: sandbox, options: {processes: '3'}", "processes '3'; a limit is a number above 0"),
        ("kind: http, url: 'http://h', options: {max_concurrency: 0}", "max_concurrency 0; it is a whole number from"),
        ("kind: http, url: 'http://h', options: {max_concurrency: 2.5}", "2.5; it is a whole number from 1 on"),
        ("kind: http, url: 'http://h', options: {first_pause_seconds: -1}", "it is a number from 0 on"),
        ("kind: judge, judge: {base_url: 'http://h', api_key_env: NO_SUCH_KEY_HERE}", "NO_SUCH_KEY_HERE, which is not"),
    ],
)
def test_what_a_grader_would_raise_for_each_response_is_told_before_the_start(grader: str, said: str):
    told = checked("{name: good, function: exact_answer}", f"{{name: g, {grader}}}")
    assert told.startswith("quickstart: 1 problem\n  reward.graders.1: ")
    assert said in told


@pytest.mark.parametrize(
    ("grader", "setting"),
    [
        ("kind: judge, judge: {base_url: 'http://h/v1', max_concurrency: 3}", "judge.max_concurrency"),
        ("kind: http, url: 'http://h', options: {max_concurrency: 3}", "options.max_concurrency"),
    ],
)
def test_more_reward_workers_than_a_service_takes_requests_are_refused(grader: str, setting: str):
    def four_workers(workers: int) -> RunConfig:
        pools = "pools={main: {nodes: [1], cpus_per_bundle: 2}, graders: {nodes: [4]}}"
        roles = f"roles.reward={{pool: graders, workers: {workers}}}"
        return load_config("quickstart", [f"reward.graders=[{{name: g, {grader}}}]", pools, roles])

    with pytest.raises(ConfigError) as caught:
        check_graders(four_workers(4))
    told = str(caught.value)
    assert "grader 'g' has max_concurrency 3 for the 4 workers of roles.reward together" in told
    assert f"raise {setting} to 4, or set roles.reward.workers to 3 or less" in told
    check_graders(four_workers(2))


def test_a_judge_that_each_worker_serves_itself_may_have_more_of_them_than_it_takes_requests():
    judge = "judge: {serve: {path: /judge}, max_concurrency: 1}"
    pools = "pools={main: {nodes: [1], cpus_per_bundle: 2}, graders: {nodes: [4]}}"
    grader = f"reward.graders=[{{name: g, kind: judge, {judge}}}]"
    check_graders(load_config("quickstart", [grader, pools, "roles.reward={pool: graders, workers: 4}"]))


def test_every_grader_that_cannot_be_built_is_told():
    wrong = "{name: %s, function: exact_answer, options: {no_such: 1}}"
    assert checked(wrong % "a", wrong % "b").startswith("quickstart: 2 problems\n")


def test_a_key_in_a_block_is_not_asked_for_before_the_start():
    judge = "{name: g, kind: judge, judge: {base_url: 'http://h/v1', api_key_block: no-such-block}}"
    check_graders(load_config("quickstart", [f"reward.graders=[{judge}]"]))


def test_a_plan_needs_no_key_but_tells_a_wrong_option():
    judge = "{name: g, kind: judge, judge: {base_url: 'http://h/v1', api_key_env: NO_SUCH_KEY_HERE}%s}"
    check_grader_options(load_config("quickstart", [f"reward.graders=[{judge % ''}]"]))
    with pytest.raises(ConfigError, match="judge grader 'g' has no option 'no_such'"):
        check_grader_options(load_config("quickstart", [f"reward.graders=[{judge % ', options: {no_such: 1}'}]"]))


def test_the_config_knows_every_rule_and_no_other():
    assert set(RULES) == set(GRADERS)


def test_what_two_layers_say_of_a_finish_reason_or_of_the_kl_controller_is_the_same():
    """The algorithms import nothing of ours, rules and graders no torch: each has the number, and here they meet."""
    assert [reason.name.lower() for reason in FinishReason] == list(FINISH_REASONS)
    assert FinishReason.LENGTH == diagnostics.TRUNCATED == graders.TRUNCATED
    assert batch_rules.MAX_KL_ERROR == kl.MAX_KL_ERROR
