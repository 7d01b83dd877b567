"""A policy is fitted to answers; rows that have none are told before anything is started."""

import json
from pathlib import Path

import pytest

from configs.load import load_config
from configs.problems import ConfigError
from resources.demonstration_rows import WARM_UP_EPOCH, check_answers
from resources.models.causal_lm import load_tokenizer
from resources.prompt_sources import PromptError
from resources.prompts import PromptSource
from resources.workers.demonstrations import DemonstrationWorker


def table(folder: Path, *answers: str) -> str:
    rows = [{"prompt": f"{number}=", "answer": answer} for number, answer in enumerate(answers)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.sources=[{{name: s, kind: json, path: {folder / 'rows.jsonl'}}}]"


def config_of(*overrides: str):
    return load_config("quickstart", ["data.prompts_per_iteration=2", "algorithm.num_mini_batches=1", *overrides])


def refused(*overrides: str) -> list[str]:
    try:
        check_answers(config_of(*overrides))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_a_row_of_the_warm_up_without_an_answer_is_told_with_its_number(tmp_path: Path):
    assert refused(table(tmp_path, "1", "2"), "sft.steps=1", "sft.batch_size=8") == []
    [said] = refused(table(tmp_path, "1", " ", "2"), "sft.steps=1", "sft.batch_size=8")
    assert said.startswith(
        "data.sources.0: source 's': rows [1] (1 in all) have no answer, and the 8 rows of sft.steps"
    )


def test_a_row_without_an_answer_that_the_warm_up_does_not_read_is_left_alone(tmp_path: Path):
    few = [table(tmp_path, *("" if number == 3 else "1" for number in range(8))), "sft.steps=1", "sft.batch_size=2"]
    config = config_of(*few)
    order = PromptSource(config.data, load_tokenizer(config.model)).rows(WARM_UP_EPOCH, 0, 8).prompts
    place = [prompt.index for prompt in order].index(3)
    assert place > 0
    assert refused(*few, f"sft.batch_size={place}") == []
    assert len(refused(*few, f"sft.batch_size={place + 1}")) == 1


@pytest.mark.parametrize(
    "fit",
    ["sft=null", "sft.steps=0", "sft.turns=['ask {prompt}']", "sft.objective=reward_model", "ray.address=head:6379"],
)
def test_where_no_answer_is_learnt_or_the_rows_lie_elsewhere_none_is_asked_for(tmp_path: Path, fit: str):
    assert refused(table(tmp_path, "", ""), fit) == []


def test_a_data_set_of_reasoning_gym_that_has_no_answers_is_refused():
    gym = "data.sources=[{name: g, kind: reasoning_gym, path: propositional_logic, size: 4}]"
    [said] = refused(gym, "sft.steps=1", "sft.batch_size=4", "data.overlong_prompts=truncate_left")
    assert "source 'g': rows [0, 1, 2, 3] (4 in all) have no answer" in said


@pytest.mark.parametrize("turns", [(), ("think of {prompt}", "{answer}")])
def test_the_worker_teaches_no_empty_answer(tmp_path: Path, turns: tuple[str, ...]):
    config = config_of(table(tmp_path, "1", ""))
    worker = DemonstrationWorker(config.model, config.data, turns=turns)
    with pytest.raises(PromptError, match="row 1 of source 's' has no answer to learn from"):
        worker.read(0, 0, 2)
    assert DemonstrationWorker(config.model, config.data, turns=("{prompt}",)).read(0, 0, 2)[1].shape[0] == 2
