"""Supervised runs on the quick-start task, and LoRA: what is published loads in plain transformers and peft."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import tasks.supervised
from configs.layout import process_groups
from configs.load import check_config, dump_config
from configs.model import LoraConfig, ModelConfig
from configs.run import RunConfig
from resources.batch import row_lengths
from resources.casting import Casting, duties_of, worker_spec
from resources.import_paths import import_class
from resources.local_group import LocalGroup
from resources.models.character_tokenizer import build_character_tokenizer
from resources.prompt_sources import PromptError
from resources.update_plan import make_update_plans
from resources.workers.actor import ActorWorker
from resources.workers.preferences import PreferenceWorker
from resources.workers.reward_model import RewardModelWorker
from resources.workers.reward_trainer import RewardTrainerWorker
from tasks.host import call_step, use_host
from tasks.supervised import both_rows, preferences, publish_reward_model, reward_model_fit
from tests.tasks.local_cast import SmallCast, small_config
from tests.tasks.local_run import LocalRun, cast_here, warm_up_here

WIDE = ("model.shape.hidden_size=64", "model.shape.intermediate_size=128", "model.shape.num_layers=2")


def likelihood(model, tokenizer, prompt: str, answer: str) -> float:
    """Log-prob of the answer after the prompt."""
    ids = torch.tensor([tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]])
    start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    log_probs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1)
    return float(log_probs[start - 1 :].sum())


def test_a_warmed_up_model_loads_in_transformers_and_knows_the_answers_better(tmp_path: Path):
    config = small_config(*WIDE, "sft.steps=20", "sft.optimizer.lr=3e-3")
    warm_up_here(config, tmp_path)
    fitted = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    warm_up_here(small_config(*WIDE, "sft.steps=1", "sft.optimizer.lr=1e-9"), tmp_path / "fresh")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh" / "model")
    with torch.no_grad():
        after, before = (likelihood(model, tokenizer, "53172=", "12357") for model in (fitted, fresh))
    assert after > before + 5.0


def pairs(path: Path, count: int) -> str:
    """Preferred: sorted upwards. Rejected: sorted downwards."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        digits = draw.sample("0123456789", 5)
        rows.append(
            {
                "prompt": "".join(digits) + "=",
                "chosen": "".join(sorted(digits)),
                "rejected": "".join(sorted(digits, reverse=True)),
            }
        )
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return f"data.sources=[{{name: pairs, kind: json, path: {path}, answer_column: chosen}}]"


def reward_run(config: RunConfig) -> LocalRun:
    fitting = config.actor.model_copy(update={"optimizer": config.sft.optimizer})
    return LocalRun(
        config,
        {
            "reward_trainer": LocalGroup("reward_trainer", [RewardTrainerWorker(config.model, fitting, config.seed)]),
            "preferences": LocalGroup("preferences", [PreferenceWorker(config.model, config.data)]),
        },
    )


def test_a_reward_model_learns_the_preference_and_loads_in_transformers(tmp_path: Path):
    config = small_config(
        *WIDE, pairs(tmp_path / "pairs.jsonl", 200), "sft.optimizer.lr=3e-3", "actor.micro_batch_size=32"
    )
    run = reward_run(config)
    at = replace(run.state.stamp(config, 1), count=25 * 32)
    with use_host(run.context):
        rows = call_step(preferences, at)
        result = call_step(reward_model_fit, at, rows, 25)
        call_step(publish_reward_model, at, str(tmp_path / "model"))
    assert result.metrics["reward_model/optimizer_steps"] == 25
    assert result.metrics["reward_model/accuracy"] > 0.6  # over all steps, the first ones included

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        texts = ["90817=01789", "90817=98710", "42536=23456", "42536=65432"]
        ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
        scores = model(torch.tensor(ids)).logits.squeeze(1).tolist()
    assert scores[0] > scores[1]
    assert scores[2] > scores[3]

    # The project's own reward model reads the same folder, and gives each row the same score.
    worker = RewardModelWorker(ModelConfig(path=str(tmp_path / "model")), config.actor, 0)
    _, batch = run.context.group("preferences").workers[0].read(0, 0, 4)
    _, scored = worker.score(batch)
    own = scored["scores"].reshape(4, 2)
    assert (own[:, 0] > own[:, 1]).all()

    # A grader of kind `model` starts from it, in the process of the reward worker.
    data = dump_config(small_config("algorithm.name=rloo"))
    data["reward"]["graders"] = [{"name": "liked", "kind": "model", "model": {"path": str(tmp_path / "model")}}]
    judged = check_config(data)
    groups = cast_here(judged)
    judged_run = LocalRun(judged, groups)
    judged_run.sync()
    metrics = judged_run.iterate()
    groups["reward"].call("close")
    assert metrics["reward/grader/liked/score_mean"] == pytest.approx(metrics["reward/score_mean"])
    assert metrics["reward/groups_with_signal"] > 0.5


def test_a_reward_model_with_adapters_keeps_its_trunk_and_is_exported_merged(tmp_path: Path):
    config = small_config(pairs(tmp_path / "pairs.jsonl", 40), "sft.optimizer.lr=1e-2")
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": LoraConfig(rank=2)})})
    run = reward_run(config)
    scalar = run.context.group("reward_trainer").workers[0].module.scalar
    trunk = {name: one.detach().clone() for name, one in scalar.named_parameters() if "base_layer" in name}
    at = replace(run.state.stamp(config, 1), count=20)
    with use_host(run.context):
        rows = call_step(preferences, at)
        call_step(reward_model_fit, at, rows, 2)
        call_step(publish_reward_model, at, str(tmp_path / "model"))
    assert all(torch.equal(dict(scalar.named_parameters())[name], one) for name, one in trunk.items())

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[5, 9, 30, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, 0], scalar.read(ids)[:, -1], atol=1e-5, rtol=1e-5)
    merged = model.model.layers[0].self_attn.q_proj.weight
    assert not torch.equal(merged, trunk["model.layers.0.self_attn.q_proj.base_layer.weight"])


def test_a_fit_in_many_calls_ends_with_the_weights_of_one_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = small_config(pairs(tmp_path / "pairs.jsonl", 40))
    weights, results, asked = [], [], []

    class Counted(LocalGroup):
        def submit(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
            asked.append((method, tasks.supervised.STEPS_PER_CALL))
            return super().submit(method, *args, timeout=timeout, **kwargs)

    for steps_per_call in (2, 5):
        monkeypatch.setattr("tasks.supervised.STEPS_PER_CALL", steps_per_call)
        run = reward_run(config)
        run.context.groups["reward_trainer"] = Counted("reward_trainer", run.context.group("reward_trainer").workers)
        at = replace(run.state.stamp(config, 1), count=20)
        with use_host(run.context):
            rows = call_step(preferences, at)
            results.append(call_step(reward_model_fit, at, rows, 5))
        weights.append(run.context.group("reward_trainer").workers[0].module.state_dict())
    assert asked == [("update", 2), ("update", 2), ("update", 2), ("update", 5)]
    assert results[0].metrics == pytest.approx(results[1].metrics)
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_micro_batches_hold_whole_pairs_on_every_rank():
    plans = make_update_plans([0, 2, 4, 6], [9, 3, 5, 4], [1] * 4, dp_size=2, num_mini_batches=2, micro_batch_size=1)
    for plan in map(both_rows, plans):
        for mini in plan.mini_batches:
            assert mini.num_sequences == 2
            for micro in mini.micro_batches:
                assert micro[1::2] == tuple(row + 1 for row in micro[0::2])


def test_a_micro_batch_of_pairs_padded_to_its_longest_response_keeps_to_the_budget(tmp_path: Path):
    table = [{"prompt": f"{k:05d}=", "chosen": "1", "rejected": "1" * (10 + k)} for k in range(12)]
    (tmp_path / "uneven.jsonl").write_text("\n".join(json.dumps(row) for row in table))
    source = f"data.sources=[{{name: p, kind: json, path: {tmp_path / 'uneven.jsonl'}, answer_column: chosen}}]"
    config = small_config(source, "data.prompts_per_iteration=2", "actor.micro_batch_tokens=120")
    asked = []

    class Noted(LocalGroup):
        def submit(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
            asked.append(args[:2])
            return super().submit(method, *args, timeout=timeout, **kwargs)

    run = reward_run(config)
    run.context.groups["reward_trainer"] = Noted("reward_trainer", run.context.group("reward_trainer").workers)
    with use_host(run.context):
        rows = call_step(preferences, replace(run.state.stamp(config, 1), count=12))
        call_step(reward_model_fit, run.state.stamp(config, 1), rows, 1)
    [[plan]] = [plans for _, plans in asked]
    _, loaded = run.context.group("preferences").workers[0].read(0, 0, 12)
    lengths = dict(zip(loaded["row_ids"].tolist(), row_lengths(loaded.get("input_ids")).tolist(), strict=True))
    padded = [len(micro) * max(lengths[row] for row in micro) for micro in plan.mini_batches[0].micro_batches]
    assert max(padded) <= 120
    assert len(padded) < 12, "more than one pair fits"


def test_pairs_are_read_with_the_tools_that_prompts_are_sampled_with(tmp_path: Path):
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = "{{ tools[0]['function']['name'] }}:{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path)
    tools = "rollout.tools={functions: ['resources.tools.calculator:calculate']}"
    rendered = (f"model.tokenizer_path={tmp_path}", "data.chat_template=true", "data.max_prompt_length=24")
    config = small_config(pairs(tmp_path / "pairs.jsonl", 8), tools, *rendered)
    [group, *_] = [group for group in process_groups(config) if "actor" in duties_of(group)]
    spec = worker_spec(Casting(config=config, model=config.model), group, "preferences")
    _, rows = import_class(str(spec.worker))(*spec.args, **spec.kwargs).read(0, 0, 1)
    assert tokenizer.decode(rows.get("input_ids").values()[:10]) == "calculate:"


def test_the_loss_of_pairs_does_not_depend_on_the_micro_batch(tmp_path: Path):
    source = pairs(tmp_path / "pairs.jsonl", 40)
    norms = []
    for size in (4, 40):
        config = small_config(source, f"actor.micro_batch_size={size}")
        run = reward_run(config)
        at = replace(run.state.stamp(config, 1), count=20)
        with use_host(run.context):
            rows = call_step(preferences, at)
            norms.append(call_step(reward_model_fit, at, rows, 1).metrics["reward_model/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_row_without_a_rejected_response_is_named(tmp_path: Path):
    path = tmp_path / "half.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{k}=", "chosen": "1"}) for k in range(10)))
    config = small_config(f"data.sources=[{{name: half, kind: json, path: {path}, answer_column: chosen}}]")
    with pytest.raises(PromptError, match=r"of source 'half' is no preference pair: .* rejected one None"):
        PreferenceWorker(config.model, config.data).read(0, 0, 1)


def test_a_lora_run_trains_against_its_own_base_and_its_adapter_loads_in_peft(small_cast: SmallCast, tmp_path: Path):
    config = lora_config()
    run = small_cast.run(config, fresh=["actor"])
    first, second = run.iterate(), run.iterate()
    assert first["actor/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["actor/reference_kl"] != 0.0

    actor = run.context.group("actor").workers[0]
    actor.export(str(tmp_path / "merged"))
    base_folder = tmp_path / "base"
    ActorWorker(config.model.model_copy(update={"lora": None}), config.actor, config.seed).export(str(base_folder))
    actor.export_adapter(str(tmp_path / "adapter"), str(base_folder))

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    ids = torch.tensor([[5, 9, 30, 7]])
    with torch.no_grad():
        plain = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
        torch.testing.assert_close(adapted, merged(ids).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(adapted, plain, atol=1e-4)


def lora_config() -> RunConfig:
    """The small quick start without the reference role, which a LoRA run has no need of."""
    data = dump_config(small_config())
    data["roles"].pop("reference")
    data["model"]["lora"] = {"rank": 4, "alpha": 8.0}
    data["algorithm"] |= {"name": "grpo"}
    data["algorithm"]["kl"]["coef"] = 0.01
    data["actor"]["optimizer"]["lr"] = 1e-2
    data["rollout"]["group_size"] = 4
    return check_config(data)


def test_an_actor_without_adapters_has_none_to_export(small_cast: SmallCast, tmp_path: Path):
    with pytest.raises(ValueError, match="no adapter to export"):
        small_cast.groups["actor"].workers[0].export_adapter(str(tmp_path / "adapter"), "base")
