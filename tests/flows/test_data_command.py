"""`callsheet data` shows the prompts as a run renders them."""

import json
from pathlib import Path

import pytest

from flows.cli import main
from resources.models.character_tokenizer import build_character_tokenizer

NAMES = "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"


def tool_template(folder: Path) -> list[str]:
    """Settings under which the quick start with tools tells of them in a chat template."""
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = NAMES + "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    few = "data.sources=[{name: calculator, kind: calculator, size: 64}]"
    given = [f"model.tokenizer_path={folder}", "data.chat_template=true", "data.max_prompt_length=24", few]
    return [part for setting in given for part in ("--set", setting)]


def test_prompts_are_shown_with_the_tools_that_training_renders_them_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["data", "quickstart-tools", "--json", *tool_template(tmp_path)]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert {source["part"] for source in sources} == {"training", "validation"}
    for source in sources:
        assert [sample["text"][:11] for sample in source["samples"]] == ["[calculate]"] * 2
        assert all(sample["tokens"] == len(sample["text"]) for sample in source["samples"])


def test_a_tool_that_cannot_be_offered_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = [*tool_template(tmp_path), "--set", "rollout.tools.functions=['json:nothing']"]
    assert main(["data", "quickstart-tools", *options]) == 2
    assert "'json' has no function or class 'nothing'" in capsys.readouterr().err
