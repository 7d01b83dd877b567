"""What is refused before anything is started: unusable models, tokenizers and tables."""

import json
import re
from pathlib import Path

import pytest

from configs.load import load_config
from configs.problems import ConfigError
from resources.input_check import check_inputs
from resources.models.character_tokenizer import build_character_tokenizer

LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "max_position_embeddings": 12,
}  # fmt: skip

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def refused(*overrides: str) -> list[str]:
    try:
        check_inputs(load_config("quickstart-grpo", ["data.prompts_per_iteration=64", *overrides]))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def table(folder: Path, rows: list[dict], name: str = "rows") -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.sources=[{{name: s, kind: json, path: {path}}}]"


def model_folder(folder: Path, **changes) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    build_character_tokenizer().save_pretrained(folder)
    return f"model={{path: {folder}}}"


ROWS = [{"prompt": f"{n:05d}=", "answer": str(n)} for n in range(64)]


def test_what_can_be_used_is_not_refused(tmp_path: Path):
    assert refused() == []
    assert refused(table(tmp_path, ROWS)) == []


def test_generated_prompts_that_are_all_longer_than_the_limit_are_refused():
    [said] = refused("data.max_prompt_length=3")
    assert "all 20000 prompts are longer than data.max_prompt_length = 3 tokens; raise it" in said


def test_unusable_rows_of_training_and_validation_are_told_together(tmp_path: Path):
    training = table(tmp_path, [{"prompt": None, "answer": "1"}], "training")
    assert [said.partition(": ")[0] for said in refused(training, held_out(table(tmp_path, [], "held-out")))] == [
        "data.sources.0", "validation.sources.0",
    ]  # fmt: skip


def test_a_table_smaller_than_an_iteration_is_refused(tmp_path: Path):
    [said] = refused(table(tmp_path, ROWS[:63]))
    assert said.startswith("data.prompts_per_iteration is 64; data.sources have 63 rows")
    [said] = refused("validation.num_prompts=257")
    assert said == (
        "validation.num_prompts is 257; validation.sources have 256 rows; add rows, or set it to at most 256"
    )


def test_a_table_that_filtering_makes_smaller_than_an_iteration_is_refused(tmp_path: Path):
    [said] = refused(table(tmp_path, [*ROWS[:63], {"prompt": "123456789", "answer": ""}]))
    assert said.startswith("data: 63 prompts are left (1 were filtered out) but data.prompts_per_iteration is 64")
    [said] = refused(table(tmp_path, [*ROWS, {"prompt": "123456789", "answer": ""}]), "data.overlong_prompts=error")
    assert "(row 64: 9 tokens)" in said


def held_out(given: str) -> str:
    return given.replace("data.", "validation.").replace("name: s", "name: v")


def test_a_held_out_table_that_filtering_makes_smaller_than_a_validation_is_refused(tmp_path: Path):
    rows = held_out(table(tmp_path, [*ROWS, {"prompt": "123456789", "answer": "1"}]))
    assert refused(rows, "validation.num_prompts=64") == []
    [said] = refused(rows, "validation.num_prompts=65")
    assert said.startswith(
        "validation: 64 held-out prompts are left (1 were filtered out) but validation.num_prompts is 65"
    )


def test_held_out_prompts_that_are_made_too_long_are_refused():
    [said] = refused("validation.sources=[{name: v, kind: sorting, size: 256, options: {num_digits: 8}}]")
    assert said.startswith("validation: source 'v': all 256 prompts are longer than data.max_prompt_length = 8 tokens")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"max_position_embeddings": 15}, "has 15 positions, and .* = 16 tokens"), ({"vocab_size": 99}, "99 embeddings")],
)
def test_a_model_too_small_for_the_run_is_refused(tmp_path: Path, changes: dict, said: str):
    [problem] = refused(model_folder(tmp_path, **{"max_position_embeddings": 16} | changes))
    assert re.search(said, problem), problem


def test_a_model_with_heads_that_vllm_has_no_attention_for_is_refused_on_a_cpu(tmp_path: Path):
    model = model_folder(tmp_path, max_position_embeddings=16, num_attention_heads=2)
    [problem] = refused(model)
    assert problem.startswith("rollout.engine is 'vllm'; each attention head of model is 16 wide")
    assert refused(model, "rollout.engine=huggingface") == []


def test_an_attention_whose_package_is_not_there_is_refused():
    given = ["model.attention=flash_attention_2", "model.dtype=bfloat16", "pools.main.accelerator=gpu"]
    [said] = refused(*given)
    assert said.startswith("model.attention is 'flash_attention_2'; the package flash-attn is not installed here")


def test_a_stop_token_that_the_model_does_not_have_is_refused(tmp_path: Path):
    model = model_folder(tmp_path, max_position_embeddings=16)
    [problem] = refused(model, "rollout.sampling.stop_token_ids=[2, 100]")
    assert "has [100], which no response can hold: the model has 100 tokens" in problem
    assert refused(model, "rollout.sampling.stop_token_ids=[99]") == []


def test_a_folder_without_weights_tokenizer_or_anything_is_refused(tmp_path: Path):
    assert "does not exist" in refused("model={path: ./nowhere}")[0]
    whole = model_folder(tmp_path, max_position_embeddings=16)
    assert refused(whole) == []
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (tmp_path / name).unlink()
        [problem] = refused(whole)
        assert str(tmp_path) in problem


def test_a_folder_whose_weights_are_cut_short_is_refused_once(tmp_path: Path):
    whole = model_folder(tmp_path, max_position_embeddings=16)
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS[:-1])
    [problem] = refused(whole)
    assert problem.startswith(f"model: {tmp_path}/model.safetensors has 9 bytes and its header alone would take 2")


def test_generated_prompts_that_cannot_be_made_are_refused():
    source = "data.sources=[{name: s, kind: %s, size: 64, %s}]"
    assert refused(source % ("sorting", "options: {num_digits: 0}")) == [
        "data.sources.0: source 's': num_digits is 0; it is a whole number from 1 to 64"
    ]
    none = "validation.sources=[{name: v, kind: sorting, size: 257, options: {num_digits: 3}}]"
    assert "asks for 257 rows but the held-out part of its space has" in refused(none)[0]
    [said] = refused(source % ("reasoning_gym", "path: chess_problems"))
    assert said.startswith("data.sources.0: source 's': reasoning-gym has no data set 'chess_problems'")
    [said] = refused(source % ("reasoning_gym", "path: basic_arithmetic, options: {words: 3}"))
    assert "reasoning-gym's basic_arithmetic refuses options {'words': 3}" in said


REWARD_MODEL = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def graded_by(folder: Path) -> str:
    return f"reward.graders=[{{name: g, kind: model, model: {{path: {folder}}}}}]"


def test_a_reward_model_without_a_trained_head_is_refused(tmp_path: Path):
    model_folder(tmp_path, vocab_size=128, architectures=["LlamaForCausalLM"])
    [problem] = refused(graded_by(tmp_path))
    assert problem.startswith(f"reward.graders.0.model: {tmp_path} holds ['LlamaForCausalLM'] with 2 labels")
    model_folder(tmp_path, vocab_size=128, **REWARD_MODEL)
    assert refused(graded_by(tmp_path)) == []


def test_a_model_that_reads_other_tokens_in_the_policys_ids_is_refused(tmp_path: Path):
    model_folder(tmp_path, vocab_size=99, **REWARD_MODEL)
    assert "has 99 embeddings and is fed the policy's token ids, up to 99" in refused(graded_by(tmp_path))[0]
    model_folder(tmp_path, vocab_size=128, **REWARD_MODEL)
    words = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    [problem] = refused(graded_by(tmp_path))
    assert "numbers 2 of 100 tokens otherwise, for example ['1', '2']" in problem
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert refused(graded_by(tmp_path)) == []


def test_a_critic_that_reads_other_tokens_is_refused_where_there_is_a_critic(tmp_path: Path):
    model_folder(tmp_path, vocab_size=99)
    critic = f"critic.model={{path: {tmp_path}}}"
    assert refused(critic) == []  # grpo has none
    with_critic = ["algorithm.name=ppo", "roles.critic={pool: main, colocate: fused, workers: 1}"]
    assert refused(critic, *with_critic)[0].startswith(f"critic.model: {tmp_path} has 99 embeddings")


def test_adapters_for_layers_that_the_model_does_not_have_are_refused():
    roles = "roles={actor: {pool: main}, rollout: {pool: main}, reward: {pool: main}}"
    assert refused("model.lora={}", roles) == []
    [problem] = refused("model.lora={target_modules: [q_proj, c_attn]}", roles)
    assert problem.startswith("model.lora.target_modules: lora.target_modules has ['c_attn'], which no layer")


def user_module(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """Write `text` as a module of its own that this process can import; gives its name."""
    name = f"user_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return name


def test_tools_that_cannot_be_offered_are_refused_whatever_the_prompts_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = user_module(tmp_path, monkeypatch, "def bare(x): return x\nvalue = 3\n")
    [said] = refused(f"rollout.tools={{functions: ['{module}:bare']}}")
    assert said == ("rollout.tools.functions: tool 'bare': parameter 'x' has no type hint; the schema is made from it")
    [said] = refused(f"rollout.tools={{functions: ['{module}:value']}}")
    assert f"'{module}' has no function or class 'value'" in said
    (tmp_path / "raises_at_import.py").write_text("1 / 0")
    [said] = refused("rollout.tools={functions: ['raises_at_import:f']}")
    assert "'raises_at_import' does not import: ZeroDivisionError" in said


def test_an_environment_that_cannot_be_made_is_refused():
    env = "roles.env={pool: main, colocate: shared}"
    [said] = refused(env, "rollout.tools={environment: 'tests.resources.environments_here:Chess'}")
    assert said.startswith("rollout.tools.environment: environment 'tests.resources.environments_here:Chess'")
    options = "environment_options: {moves: 3}"
    [said] = refused(env, f"rollout.tools={{environment: 'tests.resources.environments_here:Countdown', {options}}}")
    assert "cannot be made with options {'moves': 3}" in said


def test_a_folder_of_modules_that_is_not_there_is_told(tmp_path: Path):
    (tmp_path / "file").touch()
    for absent in (tmp_path / "gone", tmp_path / "file"):
        (said,) = refused(f"code.import_paths=['{absent}']")
        assert said.startswith(f"code.import_paths.0 is '{absent}'; there is no such folder")
