"""Teachers: routing by data source, tokens that must be the same, scores and likeliest tokens, all in-process."""

import functools
import json
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerFast

from configs.layout import process_groups
from configs.load import load_config
from configs.model import ModelConfig
from configs.problems import ConfigError
from configs.training import TeacherConfig, TrainedRoleConfig
from resources.batch import join_columns, make_shard, ragged_from_rows, row_lengths
from resources.models.causal_lm import build_causal_lm, save_model_folder
from resources.models.character_tokenizer import build_character_tokenizer
from resources.teachers import TeacherError, check_teachers, match_tokens, route
from resources.workers.actor import ActorWorker
from resources.workers.teacher import TeacherWorker
from tasks.algorithms.objectives import actor_objective
from tests.resources.workers.tiny import MODEL, TEMPERATURE, actor, make_rows, plans, scored

SETTINGS = TrainedRoleConfig(micro_batch_size=3, log_prob_chunk_tokens=7)
SORTER, ADDER = (
    TeacherConfig(name="sorter", model=MODEL, sources=("sorting",)),
    TeacherConfig(name="adder", model=MODEL, sources=("sums", "products")),
)


def rows_from(*sources: str) -> TensorDict:
    records = [json.dumps({"prompt": "1", "source": source}).encode() for source in sources]
    return make_shard(
        {
            "row_ids": torch.arange(10, 10 + len(sources)),
            "record": ragged_from_rows([torch.tensor(list(record)) for record in records], torch.uint8),
        }
    )


def test_rows_go_to_the_teacher_of_their_source() -> None:
    rows = rows_from("sums", "sorting", "products", "sorting")
    assert route(rows, [SORTER, ADDER]) == {"sorter": [11, 13], "adder": [10, 12]}


def test_a_teacher_without_rows_is_not_called_and_one_without_sources_takes_all() -> None:
    assert route(rows_from("sorting"), [SORTER, ADDER]) == {"sorter": [10]}
    assert route(rows_from("sorting", "sums"), [TeacherConfig(name="all", model=MODEL)]) == {"all": [10, 11]}


def test_a_row_that_no_teacher_is_there_for_is_refused_by_name() -> None:
    with pytest.raises(TeacherError, match=r"row 10 comes from source 'chess', for which the teachers are \[\]"):
        route(rows_from("chess"), [SORTER, ADDER])


def renumbered() -> PreTrainedTokenizerFast:
    """The character tokenizer with all ids turned round: the same tokens under other numbers."""
    plain = build_character_tokenizer()
    state = json.loads(plain.backend_tokenizer.to_str())
    last = len(plain) - 1
    state["model"]["vocab"] = {token: last - number for token, number in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        added["id"] = last - added["id"]
    return tokenizer_of(state, plain)


def tokenizer_of(state: dict, plain: PreTrainedTokenizerFast, **special: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer

    tokens = {name: str(getattr(plain, name)) for name in ("pad_token", "bos_token", "eos_token", "unk_token")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **{**tokens, **special})


def test_equal_tokenizers_match_and_renumbered_ones_are_translated() -> None:
    plain = build_character_tokenizer()
    assert match_tokens(plain, build_character_tokenizer(), "t") is None
    table = match_tokens(plain, renumbered(), "t")
    assert table is not None
    assert [table[number] for number in plain.encode("73=")] == renumbered().encode("73=")


def test_a_teacher_with_other_tokens_is_refused_with_the_reason() -> None:
    plain = build_character_tokenizer()
    state = json.loads(plain.backend_tokenizer.to_str())
    state["model"]["vocab"]["ab"] = len(plain)
    with pytest.raises(TeacherError, match=r"'big' has another tokenizer: 0 of .* 1 of its own .* \['ab'\]"):
        match_tokens(plain, tokenizer_of(state, plain), "big")


def test_a_teacher_that_cuts_text_otherwise_is_refused() -> None:
    plain = build_character_tokenizer()
    state = json.loads(plain.backend_tokenizer.to_str())
    state["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(TeacherError, match="cuts text into them otherwise \\(normalizer differs\\)"):
        match_tokens(plain, tokenizer_of(state, plain), "low")


def test_a_teacher_with_another_end_of_sequence_is_refused() -> None:
    plain = build_character_tokenizer()
    other = tokenizer_of(json.loads(plain.backend_tokenizer.to_str()), plain, eos_token="<bos>")
    with pytest.raises(TeacherError, match="ends with '<bos>' and the student with '<eos>'"):
        match_tokens(plain, other, "t")


def test_check_teachers_tells_every_teacher_that_cannot_be_loaded(tmp_path: Path) -> None:
    config = load_config("quickstart-distillation", [f"teachers.0.model.path={tmp_path}/absent"])
    with pytest.raises(ConfigError, match=r"teachers\.0: model.path is .*absent"):
        check_teachers(config)


def test_a_teacher_scores_as_a_policy_of_the_same_weights_does() -> None:
    rows = make_rows(5)
    teacher = TeacherWorker(MODEL, SETTINGS, 0, student=MODEL, threads=1)
    own = scored(actor(), rows)
    _, shard = teacher.score(rows, TEMPERATURE)
    assert torch.equal(shard["teacher_log_probs"].values(), own["old_log_probs"].values())


def test_a_renumbered_teacher_gives_the_log_probs_of_the_same_tokens(tmp_path: Path) -> None:
    rows = make_rows(4)
    lm = build_causal_lm(MODEL, 0)
    table = match_tokens(build_character_tokenizer(), renumbered(), "t")
    assert table is not None
    size, known = lm.config.vocab_size, len(table)
    order = torch.cat([torch.tensor(table), torch.arange(known, size)])
    embedding = lm.get_input_embeddings().weight
    # The row of each token moves to its new number.
    embedding.data[order] = embedding.data.clone()  # pyright: ignore[reportCallIssue]
    save_model_folder(lm, renumbered(), tmp_path / "teacher")
    there = ModelConfig(path=str(tmp_path / "teacher"))
    plain = TeacherWorker(MODEL, SETTINGS, 0, student=MODEL, threads=1).score(rows, 1.0, 3)[1]
    moved = TeacherWorker(there, SETTINGS, 0, student=MODEL, threads=1).score(rows, 1.0, 3)[1]
    torch.testing.assert_close(moved["teacher_log_probs"].values(), plain["teacher_log_probs"].values())
    likely = plain["teacher_top_k_log_probs"].values() > -25  # embeddings without a token are not sampled by anyone
    same = moved["teacher_top_k_ids"].values() == plain["teacher_top_k_ids"].values()
    assert bool(same[likely & (plain["teacher_top_k_ids"].values() < known)].float().mean() > 0.95)


def test_likeliest_tokens_are_kept_for_sampled_tokens_alone_in_six_bytes_each() -> None:
    rows = make_rows(5)
    teacher = TeacherWorker(MODEL, SETTINGS, 0, student=MODEL, threads=1)
    _, shard = teacher.score(rows, 1.0, 4)
    ids, log_probs = shard["teacher_top_k_ids"], shard["teacher_top_k_log_probs"]
    sampled = int(rows["response_mask"].values().sum())
    assert ids.values().shape == log_probs.values().shape == (sampled, 4)
    assert (ids.dtype, log_probs.dtype) == (torch.int32, torch.float16)
    first = log_probs.values().float()
    assert bool((first[:, :-1] >= first[:, 1:]).all())  # likeliest first
    assert int(row_lengths(ids).sum()) == sampled


def test_forward_kl_to_the_same_weights_is_zero_and_pulls_another_student_towards_the_teacher() -> None:
    rows = make_rows(6)
    teacher = TeacherWorker(MODEL, SETTINGS, 0, student=MODEL, threads=1)
    sharpen(teacher.module)
    taught = join_columns([rows, teacher.score(rows, 1.0, 8)[1]])
    loss = functools.partial(actor_objective, policy_loss="distillation", aggregation="token-mean", top_k_kl_coef=1.0)

    def forward_kl(student: ActorWorker, steps: int) -> list[float]:
        batch = join_columns([taught, student.compute_log_probs(rows)[1].exclude("entropy")])
        batch["advantages"] = batch["advantages"] * 0.0
        every = [student.update(batch, plans(batch)[0], loss)["metrics"] for _ in range(steps)]
        name = "actor/teacher_forward_kl"
        return [metrics[name] / metrics[f"{name}/count"] for metrics in every]

    twin = actor()
    sharpen(twin.module)
    assert forward_kl(twin, 1)[0] == pytest.approx(0.0, abs=2e-3)  # the teacher's log-probs travel in half precision
    apart = forward_kl(actor(), 12)
    assert apart[0] > 0.3
    assert apart[-1] < 0.5 * apart[0]


def sharpen(module: torch.nn.Module) -> None:
    """A fresh model is all but uniform; larger embeddings make it prefer some tokens."""
    with torch.no_grad():
        module.lm.get_input_embeddings().weight.mul_(20.0)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def test_the_teacher_pool_is_cut_into_a_part_for_each_teacher() -> None:
    model = "{path: t, shape: {num_layers: 1, hidden_size: 128, intermediate_size: 512, num_heads: 4, vocab_size: 128}}"
    teachers = (
        f"[{{name: a, sources: [sorting], workers: 1, model: {model}}}, {{name: b, sources: [x], model: {model}}}]"
    )
    sources = "[{name: sorting, kind: sorting, size: 600}, {name: x, kind: calculator, size: 600}]"
    config = load_config(
        "quickstart-distillation",
        [f"teachers={teachers}", f"data.sources={sources}", "pools.teachers.nodes=[3]", "roles.teacher.workers=3"],
    )
    parts = {group.name: group.bundles for group in process_groups(config) if group.part}
    assert parts == {"teacher.a": (0,), "teacher.b": (1, 2)}
