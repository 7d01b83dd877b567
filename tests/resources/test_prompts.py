"""Prompts: what is read, rendered, cut, refused, and in which order."""

import json
from pathlib import Path

import pytest

from configs.data import DataConfig, SourceConfig, ValidationConfig
from resources.models.character_tokenizer import build_character_tokenizer
from resources.prompt_sources import PromptError, is_held_out, load_rows
from resources.prompts import PromptSource

TOKENIZER = build_character_tokenizer()


def source(tmp_path: Path, rows: list[dict], name: str = "file", **changes) -> SourceConfig:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return SourceConfig(name=name, kind="json", path=str(path), **changes)


def numbered(tmp_path: Path, count: int, name: str = "file", **changes) -> SourceConfig:
    return source(tmp_path, [{"prompt": f"p{k}", "answer": str(k)} for k in range(count)], name, **changes)


def numbered_letters(tmp_path: Path) -> SourceConfig:
    return source(tmp_path, [{"prompt": letter, "answer": ""} for letter in "abc"])


def prompts(*sources: SourceConfig, batch: int = 1, **changes) -> PromptSource:
    return PromptSource(DataConfig(sources=list(sources), prompts_per_iteration=batch, **changes), TOKENIZER)


def sorting(**changes) -> SourceConfig:
    return SourceConfig(name="sort", kind="sorting", **changes)


def texts(slice_) -> list[str]:
    return [prompt.text for prompt in slice_.prompts]


# Order and position


def test_an_epoch_visits_each_row_once_in_an_order_of_its_own(tmp_path):
    source_ = prompts(numbered(tmp_path, 20))
    first, second = texts(source_.rows(0, 0, 20)), texts(source_.rows(1, 0, 20))
    assert sorted(first) == sorted(second) == sorted(f"p{k}" for k in range(20))
    assert first != second


def test_the_order_is_a_function_of_data_seed_and_epoch_alone(tmp_path):
    file = numbered(tmp_path, 20)
    assert texts(prompts(file, seed=5).rows(3, 0, 20)) == texts(prompts(file, seed=5).rows(3, 0, 20))
    assert texts(prompts(file, seed=5).rows(3, 0, 20)) != texts(prompts(file, seed=6).rows(3, 0, 20))


def test_after_two_batches_of_two_the_rest_comes_once_each(tmp_path):
    # 10 rows, batch 2, stopped after 2 batches; 6 rows remain.
    source_ = prompts(numbered(tmp_path, 10))
    seen = source_.rows(0, 0, 4)
    resumed = prompts(numbered(tmp_path, 10)).rows(seen.epoch, seen.start, 6)
    assert len(set(texts(resumed))) == 6
    assert not set(texts(seen)) & set(texts(resumed))
    assert (resumed.epoch, resumed.start) == (1, 0)


def test_a_slice_runs_over_the_end_of_an_epoch_without_repeating_an_ordinal(tmp_path):
    source_ = prompts(numbered(tmp_path, 3))
    slice_ = source_.rows(0, 2, 5)
    assert [prompt.ordinal for prompt in slice_.prompts] == [2, 3, 4, 5, 6]
    assert (slice_.epoch, slice_.start) == (2, 1)


def test_the_end_of_an_epoch_is_the_beginning_of_the_next(tmp_path):
    source_ = prompts(numbered(tmp_path, 3))
    assert texts(source_.rows(0, 3, 2)) == texts(source_.rows(1, 0, 2))


def test_a_position_beyond_the_epoch_counts_on_into_the_next_ones(tmp_path):
    source_ = prompts(numbered(tmp_path, 3))
    assert texts(source_.rows(0, 7, 2)) == texts(source_.rows(2, 1, 2))


@pytest.mark.parametrize(("epoch", "start"), [(-1, 0), (0, -1)])
def test_a_negative_position_is_refused(tmp_path, epoch, start):
    with pytest.raises(PromptError, match="does not exist"):
        prompts(numbered(tmp_path, 3)).rows(epoch, start, 1)


def test_one_call_equals_two_calls_of_parts(tmp_path):
    source_ = prompts(numbered(tmp_path, 7))
    first = source_.rows(0, 0, 5)
    assert texts(source_.rows(0, 0, 9)) == texts(first) + texts(source_.rows(first.epoch, first.start, 4))


def test_skipped_prompts_are_left_out_and_the_position_moves_on(tmp_path):
    source_ = prompts(numbered(tmp_path, 4))
    order = source_.rows(0, 0, 4).prompts
    slice_ = source_.rows(0, 0, 2, skip={order[0].key, order[2].key})
    assert texts(slice_) == [order[1].text, order[3].text]
    assert (slice_.epoch, slice_.start) == (1, 0)


def test_skipping_everything_ends_with_a_message(tmp_path):
    with pytest.raises(PromptError, match="nothing left to train on"):
        prompts(numbered(tmp_path, 2)).rows(0, 0, 1, skip={"file:0", "file:1"})


def test_other_data_starts_at_its_beginning(tmp_path):
    # six rows consumed, then data of 10 and of 4 rows.
    old = prompts(numbered(tmp_path, 8, "old"))
    state = old.position_state(0, 6)
    assert old.resume_position(state) == (0, 6)
    for count in (10, 4):
        assert prompts(numbered(tmp_path, count, f"new{count}")).resume_position(state) == (0, 0)


def test_the_identity_changes_with_one_answer(tmp_path):
    one = prompts(source(tmp_path, [{"prompt": "a", "answer": "1"}])).identity
    assert one != prompts(source(tmp_path, [{"prompt": "a", "answer": "2"}])).identity
    assert one == prompts(source(tmp_path, [{"prompt": "a", "answer": "1"}])).identity


# Mixing


def test_sources_share_every_batch_by_weight(tmp_path):
    source_ = prompts(numbered(tmp_path, 30, "a", weight=2.0), numbered(tmp_path, 30, "b"))
    for start in range(0, 60, 6):
        names = [prompt.source for prompt in source_.rows(0, start, 6).prompts]
        assert (names.count("a"), names.count("b")) == (4, 2)


def test_a_small_source_of_large_weight_goes_round_evenly(tmp_path):
    source_ = prompts(numbered(tmp_path, 3, "small"), numbered(tmp_path, 21, "large"))
    counts = [texts(source_.rows(0, 0, 48)).count(f"p{k}") for k in range(3)]
    small = [prompt.index for prompt in source_.rows(0, 0, 24).prompts if prompt.source == "small"]
    assert len(small) == 12
    assert {small.count(k) for k in range(3)} == {4}
    assert min(counts) >= 8


def test_a_source_that_no_prompt_would_come_from_is_refused(tmp_path):
    heavy, light = numbered(tmp_path, 10, "heavy", weight=1000.0), numbered(tmp_path, 10, "light", weight=1.0)
    with pytest.raises(PromptError, match=r"sources \['light'\] have weights so small that none of the 20 prompts"):
        prompts(heavy, light)
    assert prompts(numbered(tmp_path, 10, "heavy", weight=15.0), light).num_rows == 20


def test_records_hold_what_graders_read(tmp_path):
    [prompt] = prompts(source(tmp_path, [{"prompt": "ä?", "answer": "1", "level": 3}])).rows(0, 0, 1).prompts
    record = json.loads(prompt.record())
    assert record == {"prompt": "ä?", "answer": "1", "source": "file", "index": 0, "extra": {"level": 3}}


# Rendering and length


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        ("filter", ["abc", "abcdefgh"]),
        ("truncate_left", ["abc", "abcdefgh", "cdefghijkl"]),
        ("truncate_right", ["abc", "abcdefgh", "abcdefghij"]),
    ],
)
def test_long_prompts_follow_the_policy(tmp_path, policy, rows):
    # lengths 3, 8 and 12, limit 10; the ids are the only copy.
    letters = "abcdefghijkl"
    file = source(tmp_path, [{"prompt": letters[:size], "answer": ""} for size in (3, 8, 12)])
    source_ = prompts(file, max_prompt_length=10, overlong_prompts=policy)
    got = [TOKENIZER.decode(prompt.ids) for prompt in source_.rows(0, 0, len(rows)).prompts]
    assert sorted(got) == sorted(rows)
    assert source_.num_filtered == 3 - len(rows)


def test_a_long_prompt_can_be_an_error_that_names_its_row(tmp_path):
    file = source(tmp_path, [{"prompt": "ab", "answer": ""}, {"prompt": "abcdef", "answer": ""}])
    said = r"1 prompts are longer than data.max_prompt_length = 4 .*\(row 1: 6 tokens\); raise it to 6"
    with pytest.raises(PromptError, match=said):
        prompts(file, max_prompt_length=4, overlong_prompts="error")


def test_filtering_below_one_batch_is_an_error_at_the_start(tmp_path):
    file = source(tmp_path, [{"prompt": "a" * 20 if k == 9 else "a", "answer": ""} for k in range(64)])
    with pytest.raises(PromptError, match=r"63 prompts are left \(1 were filtered out\).*prompts_per_iteration is 64"):
        prompts(file, batch=64, max_prompt_length=10)


def test_filtering_everything_is_an_error(tmp_path):
    with pytest.raises(PromptError, match="all 3 prompts are longer"):
        prompts(numbered(tmp_path, 3), max_prompt_length=1)


def test_a_chat_template_renders_system_prompt_and_messages(tmp_path):
    file = source(tmp_path, [{"prompt": [{"role": "user", "content": "hi"}], "answer": ""}])
    [prompt] = prompts(file, chat_template=True, system_prompt="be brief").rows(0, 0, 1).prompts
    assert TOKENIZER.decode(prompt.ids) == "be briefhi"


def test_chat_messages_without_a_template_are_refused(tmp_path):
    file = source(tmp_path, [{"prompt": [{"role": "user", "content": "hi"}], "answer": ""}])
    with pytest.raises(PromptError, match=r"chat_template is false"):
        prompts(file)


def test_a_chat_that_the_template_refuses_is_named_by_its_row(tmp_path):
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') if messages | length > 1 else 'x' }}"
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}] * 2]
    data = DataConfig(
        sources=[source(tmp_path, [{"prompt": chat, "answer": ""} for chat in chats])],
        prompts_per_iteration=1,
        chat_template=True,
    )
    with pytest.raises(PromptError, match=r"refuses row 1, whose messages are by \['user', 'user'\].*alternate"):
        PromptSource(data, tokenizer)


def test_a_prompt_that_renders_to_no_token_is_refused(tmp_path):
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = "{{ '' if messages[0]['content'] == 'b' else 'x' }}"
    data = DataConfig(sources=[numbered_letters(tmp_path)], prompts_per_iteration=1, chat_template=True)
    with pytest.raises(PromptError, match=r"rows \[1\] \(1 in all\) render to no token"):
        PromptSource(data, tokenizer)


# Kinds


def test_sorting_prompts_have_their_digits_in_order_as_answer():
    rows = load_rows(sorting(size=50, options={"num_digits": 5}))
    assert len({row.prompt for row in rows}) == 50
    assert all(len(row.prompt) == 6 and row.answer == "".join(sorted(row.prompt[:5])) for row in rows)


@pytest.mark.parametrize(("prompt", "answer"), [("2+3*4-5=", "9"), ("10-2-3=", "5"), ("0*7+1=", "1"), ("3-2*4=", "-5")])
def test_calculator_answers_follow_the_usual_precedence(prompt, answer):
    from resources.prompt_sources import _evaluate

    assert str(_evaluate(prompt[:-1])) == answer


def test_calculator_options_shape_the_prompts():
    options = {"max_operand": 9, "operators": "+", "num_operands": 3}
    rows = load_rows(SourceConfig(name="c", kind="calculator", size=40, options=options))
    for row in rows:
        parts = str(row.prompt)[:-1].split("+")
        assert len(parts) == 3
        assert str(sum(map(int, parts))) == row.answer


def test_training_and_validation_never_share_a_generated_prompt():
    train = {row.prompt for row in load_rows(sorting(size=80_000))}
    held_out = {row.prompt for seed in range(3) for row in load_rows(sorting(size=3000, seed=seed), held_out=True)}
    assert not train & held_out
    assert all(is_held_out(prompt) for prompt in held_out)


def test_validation_takes_the_held_out_part_without_being_told():
    validation = ValidationConfig(sources=[sorting(size=100)])
    data = DataConfig(sources=[sorting(size=100)], prompts_per_iteration=8)
    held_out = PromptSource.for_validation(validation, data, TOKENIZER)
    assert all(is_held_out(text) for text in texts(held_out.rows(0, 0, 100)))


def test_filtering_below_one_validation_is_an_error_at_the_start(tmp_path):
    file = source(tmp_path, [{"prompt": "a" * 20 if k == 9 else "a", "answer": ""} for k in range(10)])
    data = DataConfig(sources=[sorting(size=100)], prompts_per_iteration=8, max_prompt_length=10)
    nine, ten = (ValidationConfig(sources=[file], num_prompts=number) for number in (9, 10))
    assert PromptSource.for_validation(nine, data, TOKENIZER).num_rows == 9
    said = r"9 held-out prompts are left \(1 were filtered out\) but validation.num_prompts is 10; .* or raise"
    with pytest.raises(PromptError, match=said):
        PromptSource.for_validation(ten, data, TOKENIZER)


def test_asking_for_more_than_the_space_holds_is_refused():
    with pytest.raises(PromptError, match=r"asks for 100 rows but the training part of its space has \d+"):
        load_rows(sorting(size=100, options={"num_digits": 2}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_digit": 4}, r"no options \['num_digit'\]"),
        ({"num_digits": 0}, "num_digits is 0"),
        ({"num_digits": True}, "num_digits is True"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(PromptError, match=message):
        load_rows(sorting(options=options))


def test_a_generated_source_without_a_size_takes_what_its_space_has():
    rows = load_rows(sorting(options={"num_digits": 2}))
    held_out = load_rows(sorting(options={"num_digits": 2}), held_out=True)
    assert len(rows) + len(held_out) == 100


@pytest.mark.slow
def test_a_hub_name_may_be_a_local_folder(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    hub = SourceConfig(name="h", kind="hub", path=str(tmp_path / "data"), prompt_column="question")
    assert [(row.prompt, row.answer) for row in load_rows(hub)] == [("1+1?", "2")]


@pytest.mark.slow
def test_reasoning_gym_rows_keep_what_its_verifier_needs():
    import reasoning_gym

    rows = load_rows(SourceConfig(name="g", kind="reasoning_gym", path="gsm_symbolic", size=20))
    entry = rows[0].extra["entry"]
    scorer = reasoning_gym.create_dataset("gsm_symbolic", size=1)
    assert scorer.score_answer(rows[0].answer, entry) == 1.0
    held_out = load_rows(SourceConfig(name="g", kind="reasoning_gym", path="gsm_symbolic", size=5), held_out=True)
    assert not {row.prompt for row in rows} & {row.prompt for row in held_out}
    with pytest.raises(PromptError, match="no data set 'nothing'"):
        load_rows(SourceConfig(name="g", kind="reasoning_gym", path="nothing"))


@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"difficulty": 99.0}, {"difficulty": "hard"}])
def test_options_that_reasoning_gym_does_not_take_are_refused_with_the_options(options: dict[str, object]):
    with pytest.raises(PromptError, match=r"refuses options \{'(no_such_option|difficulty)'.*correct data\.sources"):
        load_rows(SourceConfig(name="g", kind="reasoning_gym", path="gsm_symbolic", size=5, options=options))
