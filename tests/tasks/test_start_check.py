"""What is refused before anything is started: graders and hooks that are not there or take other arguments."""

import json
import sys
from pathlib import Path

import pytest

from configs.load import load_config
from configs.problems import ConfigError
from tasks.start_check import check_start

HERE = "tests.tasks.hooks_here"


def refused(*overrides: str) -> list[str]:
    try:
        check_start(load_config("quickstart-grpo", overrides))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def grader(**fields: str) -> str:
    inside = ", ".join(f"{name}: {value}" for name, value in fields.items())
    return f"reward.graders=[{{name: g, {inside}}}]"


def test_a_run_that_can_start_is_not_refused():
    assert refused() == []
    assert refused(grader(kind="python", function=f"'{HERE}:of_a_group'", is_group_wise="true")) == []


def test_a_sink_whose_package_is_missing_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    [problem] = refused("telemetry.sinks=[tensorboard, wandb]")
    assert problem.startswith("telemetry.sinks: telemetry.sinks names 'wandb', which needs the package wandb (")
    assert problem.endswith("pip install -e '.[sinks]'")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"function": "exact"}, "reward.graders.0: grader 'g' names rule 'exact'; the rules are ['env"),
        ({"function": "numeric_answer", "options": "{unit: 3}"}, "grader 'g' has no option 'unit'; it takes []"),
        ({"function": "overlong_penalty", "options": "{buffer: 9}"}, "buffer is 9 and max_length 8; it must lie in"),
        ({"function": "response_format", "options": "{pattern: '(open'}"}, "missing ), unterminated subpattern"),
        (
            {"function": "exact_answer", "is_group_wise": "true"},
            "grader 'g' is of kind rule and has is_group_wise true, which python and http alone read; remove it",
        ),
        ({"kind": "sandbox", "options": "{network: true}"}, "code grader 'g' has no option 'network'"),
    ],
)
def test_a_grader_that_cannot_be_built_is_refused(given: dict[str, str], said: str):
    [problem] = refused(grader(**given))
    assert said in problem


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{HERE}:nobody", f"module '{HERE}' has no function 'nobody'"),
        (f"{HERE}:demanding", "needs 'columns', which is no option given"),
        (f"{HERE}:of_a_group", "needs 'responses', which is no option given"),
    ],
)
def test_a_grading_function_of_the_users_own_that_cannot_be_called_is_refused(path: str, said: str):
    [problem] = refused(grader(kind="python", function=f"'{path}'"))
    assert problem.startswith(f"reward.graders.0.function is '{path}'; graders {path} do not import on this node: ")
    assert said in problem


def test_a_sandbox_that_this_machine_cannot_make_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    [problem] = refused(grader(kind="sandbox"))
    assert problem.startswith("reward.graders.0: grader 'g': ")
    assert "is not installed on this node" in problem
    assert refused(grader(kind="sandbox", sandbox="unsafe")) == []


def test_a_judge_whose_key_is_not_there_is_refused_and_a_block_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = "judge: {base_url: 'http://judge/v1', %s}"
    [problem] = refused(f"reward.graders=[{{name: g, kind: judge, {judge % 'api_key_env: JUDGE_KEY'}}}]")
    assert "takes its key from JUDGE_KEY, which is not set" in problem
    assert refused(f"reward.graders=[{{name: g, kind: judge, {judge % 'api_key_block: judge-key'}}}]") == []


def test_hooks_prompts_and_graders_are_told_together():
    found = refused(
        f"algorithm.advantage='{HERE}:demanding'",
        "algorithm.loss='math:nothing'",
        grader(kind="python", function="'math:nothing'"),
        "validation.sources=[{name: v, kind: sorting, size: 257, options: {num_digits: 3}}]",
    )
    assert [said.split()[0] for said in found] == [
        "validation.sources.0:", "reward.graders.0.function", "algorithm:", "algorithm:",
    ]  # fmt: skip
    assert "algorithm.advantage is 'tests.tasks.hooks_here:demanding'" in found[2]
    assert "algorithm.loss is 'math:nothing'; 'math' has no function or class 'nothing'" in found[3]


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("os:path", "'os' has no class 'path'"),
        ("no_such_module:Worker", "'no_such_module' does not import: ModuleNotFoundError"),
        (f"{HERE}:of_a_group", f"'{HERE}' has no class 'of_a_group'"),
    ],
)
def test_a_worker_class_of_the_users_own_that_is_none_is_refused_by_its_key(worker: str, said: str):
    [problem] = refused(f"roles.actor.worker={worker}")
    assert problem.startswith(f"roles.actor.worker is {worker!r}; ")
    assert said in problem


def test_a_reward_model_is_not_what_a_run_is_warmed_up_with_but_may_be_fitted_alone():
    fits = ("sft={steps: 3, objective: reward_model}",)
    [problem] = refused(*fits)
    assert problem.startswith("sft.objective is 'reward_model'; before a run only the policy is warmed up")
    check_start(load_config("quickstart-grpo", fits), trains=False)
    assert refused("sft={steps: 0, objective: reward_model}") == []


def rows_to_fit(folder: Path, *rows: dict[str, str]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": "1=", **row}) + "\n" for row in rows * 64))
    return f"data.sources=[{{name: s, kind: json, path: {folder / 'rows.jsonl'}}}]"


def test_rows_that_a_fit_cannot_learn_from_are_told_where_they_are_fitted_to(tmp_path: Path):
    half = (rows_to_fit(tmp_path, {"answer": "1"}, {"answer": ""}), "sft={steps: 9, batch_size: 64}")
    [problem] = refused(*half)
    assert problem.startswith("data.sources.0: source 's': rows [1, 3, 5")
    with pytest.raises(ConfigError, match="have no answer"):
        check_start(load_config("quickstart-grpo", half), trains=False, fits=True)
    check_start(load_config("quickstart-grpo", half), trains=False)  # an evaluation
    no_pairs = load_config("quickstart-grpo", (half[0], "sft={steps: 9, objective: reward_model}"))
    with pytest.raises(ConfigError, match="row 0 of source 's' is no preference pair"):
        check_start(no_pairs, trains=False, fits=True)


def test_a_worker_whose_module_raises_is_refused_with_what_it_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_worker.py").write_text("class Worker(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    [problem] = refused("roles.actor.worker=broken_worker:Worker")
    assert "'broken_worker' does not import: SyntaxError: invalid syntax" in problem


def test_a_cluster_that_only_the_environment_names_is_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert refused() == [
        "ray.address is null; RAY_ADDRESS is 'head:6379', and which cluster a run works on stands in its config alone; "
        "set it to HOST:PORT, or unset RAY_ADDRESS to start a cluster here"
    ]
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert refused() == []
