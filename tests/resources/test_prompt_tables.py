"""Tables of prompts: what is read, and which rows are refused in which words."""

import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from configs.data import SourceConfig
from resources.prompt_sources import PromptError, load_rows


def source(tmp_path: Path, rows: list[dict], name: str = "file", **changes) -> SourceConfig:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return SourceConfig(name=name, kind="json", path=str(path), **changes)


def strings(**_settings) -> list[str]:
    """A source that forgets to name its columns; reached by its import path."""
    return ["prompt", "answer"]


def test_every_unusable_row_is_listed_with_its_column(tmp_path):
    rows = [{"prompt": None, "answer": "1"}, {"prompt": "a", "answer": None}, {"prompt": "a", "answer": "1"}]
    said = r"\(prompt is null: rows 0, 4; answer is null: row 1; prompt is missing: row 3; answer is missing: row 3\)"
    rows += [{}, {"prompt": None, "answer": "2"}]
    with pytest.raises(PromptError, match=said):
        load_rows(source(tmp_path, rows))


def test_nulls_of_a_parquet_file_are_listed_too(tmp_path):
    table = pyarrow.table({"prompt": [None, "5=", "6="], "answer": [1.0, float("nan"), 6.0]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(PromptError, match=r"\(prompt is null: row 0; answer is null: row 1\)"):
        load_rows(SourceConfig(name="x", kind="parquet", path=str(tmp_path / "x.parquet")))


def test_a_column_that_no_row_has_is_named_with_those_there_are(tmp_path):
    file = source(tmp_path, [{"question": "b", "answer": "1"}] * 2)
    with pytest.raises(PromptError, match=r"no row .* has a column 'prompt'; it has \['answer', 'question'\]"):
        load_rows(file)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("  \n", "is empty"),
        ([], "is empty"),
        (5, "is 5, neither a text nor a list of messages"),
        (["hi"], "message 0 that is 'hi'"),
        ([{"role": "user", "content": None}], "message 0 whose content is None"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1 whose role is None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 whose content is"),
    ],
)
def test_what_is_no_prompt_is_never_turned_into_text(tmp_path, prompt, said):
    with pytest.raises(PromptError, match=f"prompt .*{said}.*: row 1"):
        load_rows(source(tmp_path, [{"prompt": "a", "answer": ""}, {"prompt": prompt, "answer": ""}]))


def test_an_answer_that_json_has_no_type_for_is_its_text_without_quotation_marks(tmp_path):
    answers = {
        "decimal": pyarrow.array([Decimal("1.5"), Decimal("2.0")], pyarrow.decimal128(4, 1)),
        "date": pyarrow.array([date(2024, 2, 29), date(2025, 1, 1)]),
        "number": pyarrow.array([0.5, 2.0]),
        "flag": pyarrow.array([True, False]),
        "list": pyarrow.array([["a"], ["b", "c"]]),
    }
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p", "q"], **answers}), tmp_path / "x.parquet")
    table = SourceConfig(name="x", kind="parquet", path=str(tmp_path / "x.parquet"))
    sources = {name: table.model_copy(update={"answer_column": name}) for name in answers}
    found = {name: [row.answer for row in load_rows(one)] for name, one in sources.items()}
    assert found == {
        "decimal": ["1.5", "2.0"],
        "date": ["2024-02-29", "2025-01-01"],
        "number": ["0.5", "2.0"],
        "flag": ["true", "false"],
        "list": ['["a"]', '["b", "c"]'],
    }


def test_an_answer_may_be_empty_but_not_null(tmp_path):
    rows = [{"prompt": "a", "answer": ""}, {"prompt": "b", "answer": "1"}]
    assert [row.answer for row in load_rows(source(tmp_path, rows))] == ["", "1"]
    with pytest.raises(PromptError, match=r"\(answer is null: row 2\)"):
        load_rows(source(tmp_path, [*rows, {"prompt": "c", "answer": None}]))


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(PromptError, match="has no rows"):
        load_rows(source(tmp_path, []))


def test_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "x.json").write_text("a,b")
    with pytest.raises(PromptError, match=r"x\.json is neither"):
        load_rows(SourceConfig(name="x", kind="json", path=str(tmp_path / "x.json")))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_file_of_another_format_is_named(tmp_path, kind):
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match=rf"{tmp_path}/x is n"):
        load_rows(SourceConfig(name="x", kind=kind, path=str(tmp_path / "x")))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("math:sqrt", "math:sqrt raised TypeError"),
        ("tests.resources.test_prompt_tables:strings", "rows .0, 1. .* no objects"),
    ],
)
def test_a_function_that_gives_no_rows_is_named(path, said):
    with pytest.raises(PromptError, match=said):
        load_rows(SourceConfig(name="mine", kind="python", path=path))


def test_a_data_set_that_the_hub_does_not_have_is_named():
    with pytest.raises(PromptError, match=r"'nobody/nothing' with split 'train' cannot be loaded"):
        load_rows(SourceConfig(name="mine", kind="hub", path="nobody/nothing"))


def test_a_file_that_does_not_exist_is_named():
    with pytest.raises(PromptError, match=r"'/nowhere\.json' is no file"):
        load_rows(SourceConfig(name="x", kind="json", path="/nowhere.json"))


def test_parquet_and_json_give_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    table = load_rows(SourceConfig(name="x", kind="parquet", path=str(tmp_path / "x.parquet")))
    assert [(row.prompt, row.answer) for row in table] == [
        (row.prompt, row.answer) for row in load_rows(source(tmp_path, rows))
    ]


def test_a_function_of_yours_gives_rows(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(
        "def rows(*, split, size, seed, start):\n    return "
        "[{'prompt': f'{split}{seed}{start + k}', 'answer': None or ''} for k in range(size)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = SourceConfig(name="x", kind="python", path="my_rows:rows", size=2, seed=7, options={"start": 5})
    assert [row.prompt for row in load_rows(mine)] == ["train75", "train76"]
    assert load_rows(mine, held_out=True)[0].prompt == "validation75"


def test_an_import_path_that_fails_is_named():
    with pytest.raises(PromptError, match="path is 'nothing:here'; 'nothing' does not import"):
        load_rows(SourceConfig(name="x", kind="python", path="nothing:here"))


def json_source(tmp_path: Path, data: bytes, **changes) -> SourceConfig:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    return SourceConfig(name="rows", kind="json", path=str(path), **changes)


ROW = '{"prompt": "1=", "answer": "1"}'


@pytest.mark.parametrize(
    "data",
    [
        f"\ufeff{ROW}\n{ROW}\n",
        f"\ufeff[{ROW}, {ROW}]",
        f"{ROW}\r\n{ROW}\r\n",
        f"{ROW}\r{ROW}",
        f"\n\n{ROW}\n \t\n{ROW}",
    ],
)
def test_marks_line_ends_and_empty_lines_change_no_row(tmp_path, data):
    rows = load_rows(json_source(tmp_path, data.encode()))
    assert [(row.prompt, row.answer) for row in rows] == [("1=", "1"), ("1=", "1")]


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x1c", "\x7f"])
def test_a_text_keeps_line_ends_that_end_no_line_of_json(tmp_path, end):
    line = json.dumps({"prompt": f"a{end}b", "answer": end}, ensure_ascii=False)
    assert [row.prompt for row in load_rows(json_source(tmp_path, f"{line}\n{line}".encode()))] == [f"a{end}b"] * 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (f"{ROW}\n{ROW[:12]}", "line 2, column 12: Unterminated string"),
        (f"\n\n{ROW}}}\n", "line 3, column 32: Extra data"),
        (f'{ROW}\n{{"prompt": "1=", "answer": {"9" * 5000}}}', "neither a JSON list"),
        ("[" * 100_000, "neither a JSON list"),
        ('{"a": ' * 100_000, "neither a JSON list"),
    ],
)
def test_what_is_no_json_is_refused_with_its_line(tmp_path, data, said):
    with pytest.raises(PromptError, match=said):
        load_rows(json_source(tmp_path, data.encode()))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a\ud800", "answer": "1"}, r"prompt holds '\\ud800', half of a surrogate pair: row 1"),
        ({"prompt": "a", "answer": "\udc00"}, r"answer holds '\\udc00', half of a surrogate pair: row 1"),
        ({"prompt": [{"role": "user", "content": "\ud800"}], "answer": "1"}, "message 0 whose content holds"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_with_its_row(tmp_path, row, said):
    with pytest.raises(PromptError, match=said):
        load_rows(source(tmp_path, [{"prompt": "a", "answer": "1"}, row]))


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    (row,) = load_rows(json_source(tmp_path, b'{"prompt": "\\ud83d\\ude00", "answer": "1"}'))
    assert row.prompt == "\N{GRINNING FACE}"


def test_a_name_too_long_for_a_file_is_refused():
    with pytest.raises(PromptError, match="is no file"):
        load_rows(SourceConfig(name="x", kind="json", path="a" * 300))


@pytest.mark.parametrize(("text", "said"), [("def rows(:\n", "SyntaxError"), ("raise OSError('no')\n", "OSError: no")])
def test_a_module_that_does_not_import_is_refused_with_what_it_raised(tmp_path, monkeypatch, text, said):
    (tmp_path / "rows_that_break.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PromptError, match=f"'rows_that_break' does not import: {said}"):
        load_rows(SourceConfig(name="x", kind="python", path="rows_that_break:rows"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "sorting", "path": "a.jsonl"}, "has path 'a.jsonl', which nothing reads"),
        ({"kind": "json", "path": "a", "split": "test"}, "has split 'test', which nothing reads"),
        ({"kind": "parquet", "path": "a", "options": {"num_digits": 3}}, "has options"),
        ({"kind": "calculator", "split": "test"}, "has split 'test'"),
    ],
)
def test_a_setting_that_a_kind_of_source_does_not_read_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        SourceConfig(name="x", **settings)
