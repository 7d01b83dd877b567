"""Every source of reward in one run of the tiny model: its scores, its latencies, its share of the bottleneck map."""

import json
from pathlib import Path

import pytest

from configs.model import ModelShape
from flows.ppo import ppo
from resources.models.character_tokenizer import build_character_tokenizer
from resources.models.reward_export import export_reward_model
from resources.models.value_head import build_value_model
from resources.run_directory import read_lines
from resources.samples import read_samples_of, sample_files
from tests.sandbox_here import why_no_sandbox
from tests.scripted_service import Serve
from tests.tasks.lessons import make_teacher
from tests.tasks.local_cast import small_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_session", "ray_session")]

CODE = "f=min"
"""What the scripted engine always answers; a program, too."""
JUDGE = ModelShape(num_layers=1, hidden_size=64, intermediate_size=128, num_heads=2, vocab_size=128, max_positions=64)
HERE = "tests.resources.graders_here"


def test_every_source_scores_the_rows_of_a_run(tmp_path: Path, serve: Serve):
    service = serve(lambda body, attempt: (200, json.dumps({"score": 0.25}), {}))
    questions = tmp_path / "questions.json"
    questions.write_text(
        json.dumps([{"prompt": f"{n}?", "answer": json.dumps(["assert f(2,1)==1"])} for n in range(16)])
    )
    verdicts = tmp_path / "verdicts.json"
    verdicts.write_text(json.dumps([{"prompt": f"{CODE}?", "answer": "0.7"}] * 64))
    make_teacher(verdicts, tmp_path / "judge", steps=60, shape=JUDGE)
    sizes = "num_layers: 1, hidden_size: 16, intermediate_size: 32, num_heads: 4, vocab_size: 128, max_positions: 64"
    plain = small_config()
    scalar = build_value_model(plain.model, seed=3)
    tokenizer = build_character_tokenizer()
    export_reward_model(tmp_path / "reward-model", scalar.model.config, tokenizer, scalar.state_dict())
    judge = f"{{prompt: '{{response}}?', serve: {{path: {tmp_path / 'judge'}}}, max_model_length: 32}}"
    graders = [
        "{name: rule, kind: rule, function: exact_answer}",
        f"{{name: python, kind: python, function: '{HERE}:patient', weight: 0.1}}",
        f"{{name: group, kind: python, function: '{HERE}:tied', is_group_wise: true}}",
        f"{{name: preference, kind: model, model: {{path: {tmp_path / 'reward-model'}, shape: {{{sizes}}}}}}}",
        f"{{name: judge, kind: judge, judge: {judge}}}",
        f"{{name: service, kind: http, url: '{service.url}'}}",
        "{name: code, kind: sandbox}",
    ]
    if why_no_sandbox() is not None:
        graders.pop()
    config = small_config(
        f"run_dir={tmp_path}", "name=sources", "iterations=2", "sft=null", "checkpoint.every=0", "validation.every=0",
        "validation.at_start=false", "validation.at_end=false", "algorithm.name=grpo", "algorithm.kl.coef=0.0",
        f"data.sources=[{{name: questions, kind: json, path: {questions}}}]", "rollout.kv_cache_bytes=64MiB",
        "algorithm.overlong={max_length: 8, buffer: 4, factor: 1.0}", f"reward.graders=[{', '.join(graders)}]",
        "pools={main: {nodes: [1], cpus_per_bundle: 2}, scoring: {nodes: [1], cpus_per_bundle: 2}}",
        "roles.reward={pool: scoring, workers: 1}",
        script={"mode": "fixed", "texts": {"*": CODE}},
    )  # fmt: skip
    assert ppo(config)["iterations"] == 2
    for file in sample_files(tmp_path / "sources" / "samples").values():
        rows = read_samples_of(file)
        assert len(rows) == 32
        for row in rows:
            grades = {key.removeprefix("grader/"): row[key] for key in row if key.startswith("grader/")}
            preference = grades.pop("preference")
            fixed = {"rule": 0.0, "python": 5.0, "group": 0.25, "judge": 0.7, "service": 0.25, "code": 1.0}
            assert grades == {name: fixed[name] for name in grades}
            assert len(grades) == len(graders) - 1
            total = sum(grades.values()) - 4.5 + preference
            assert row["score"] == pytest.approx(total, abs=1e-4)
    metrics = list(read_lines(tmp_path / "sources" / "metrics.jsonl"))
    # Five characters and the end: two of the buffer's four, so half the penalty.
    assert [line["reward/overlong_penalty"] for line in metrics] == [-0.5, -0.5]
    spans = list(read_lines(tmp_path / "sources" / "spans.jsonl"))
    scored = [span for span in spans if span.get("task") == "reward"]
    assert {span["pool"] for span in scored} == {"scoring"}
    # The reward model's seconds are part of the step, and of its graders.
    assert {rank.get("duty") for span in scored for rank in span["ranks"]} == {None, "reward_model.preference"}
    assert [{one["name"]: one["calls"] for one in span["graders"]}["preference"] for span in scored] == [1, 1]
    told = {grader["name"]: grader for grader in scored[0]["graders"]}
    assert {"rule", "python", "group", "judge", "service"} <= set(told)
