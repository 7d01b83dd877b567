"""Episodes of several turns through the whole flow: a calculator, and environments on a pool of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.run import RunConfig
from flows.evaluation import evaluation
from flows.ppo import ppo
from flows.side_commands import renamed
from resources.run_directory import read_lines
from resources.samples import read_samples_of, sample_files

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]

SMALL = (
    "iterations=2", "sft=null", "checkpoint.every=0", "validation.every=0", "validation.at_start=false",
    "validation.at_end=false", "rollout.engine=scripted", "model.shape.num_layers=1", "model.shape.hidden_size=16",
    "model.shape.intermediate_size=32", "data.prompts_per_iteration=8", "rollout.group_size=2",
    "algorithm.num_mini_batches=2", "algorithm.num_ppo_epochs=1",
)  # fmt: skip


def scripted(texts: dict[str, str], *overrides: str) -> RunConfig:
    script = json.dumps({"responses": {"mode": "fixed", "texts": texts}})
    return load_config("quickstart-tools", [*SMALL, f"rollout.scripted={script}", *overrides])


def lines(config: RunConfig, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return list(read_lines(Path(config.run_dir) / config.name / name))


def test_a_calculator_is_called_and_what_it_says_is_read_and_not_trained(tmp_path: Path):
    call, answer = "[calculate(6*7)]", "42"
    config = scripted({"*": call, "*/2": answer}, f"run_dir={tmp_path}", "name=tools")
    assert ppo(config)["iterations"] == 2
    for line in lines(config):
        assert line["rollout/calls_mean"] == 1.0
        assert line["rollout/call_errors_mean"] == 0.0
        assert line["rollout/turns_mean"] == 2.0
        assert line["rollout/read_tokens_mean"] == len(" 42; ")
        # The call, the answer and its end are sampled; what the tool said is not among them.
        assert line["rollout/response_length_mean"] == len(call) + len(answer) + 1
    for path in sample_files(tmp_path / "tools" / "samples").values():
        assert {row["response"] for row in read_samples_of(path)} == {call + answer}


def test_environments_live_on_a_pool_of_their_own_and_give_the_score(tmp_path: Path):
    rows, held_out = tmp_path / "rows.json", tmp_path / "held_out.json"
    for file, mark in ((rows, "!"), (held_out, "?")):
        file.write_text(json.dumps([{"prompt": f"{number}{mark}", "answer": "2"} for number in range(16)]))
    tools = "{environment: 'tests.resources.environments_here:Countdown', max_turns: 4, result_template: '({result})'}"
    config = scripted(
        {"*": "2", "*/2": "x"}, f"run_dir={tmp_path}", "name=worlds", f"rollout.tools={tools}",
        f"data.sources=[{{name: rows, kind: json, path: {rows}}}]",
        "reward.graders=[{name: score, kind: rule, function: environment_score}]",
        f"validation.sources=[{{name: rows, kind: json, path: {held_out}}}]", "validation.num_prompts=8",
        "pools={main: {nodes: [1], cpus_per_bundle: 2}, worlds: {nodes: [2], cpus_per_bundle: 1}}",
        "roles.env={pool: worlds, workers: 2}",
    )  # fmt: skip
    assert ppo(config)["iterations"] == 2
    for line in lines(config):
        assert line["rollout/turns_mean"] == 2.0
        assert line["reward/score_mean"] == 0.5  # one of two numbers was right
        assert line["rollout/call_errors_mean"] == 0.0
    logs = {path.name for path in (tmp_path / "worlds" / "logs").iterdir()}
    assert {"env-0.log", "env-1.log"} <= logs

    scored = evaluation(renamed(config, config.model), None)  # of the whole cast engine, graders and environments alone
    assert scored["metrics"]["validation/accuracy"] == 0.5
    logs = {path.name for path in (Path(scored["run"]) / "logs").iterdir()}
    assert {"env-0.log", "env-1.log"} <= logs
    assert not [name for name in logs if "critic" in name]
