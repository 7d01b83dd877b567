"""The reward loop: scores do not depend on the order of arrival, and one failure never costs another row its score."""

import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from resources.graders import FinishedRow, Grader, GraderFailedError, Sample, check_scores, owner_of, read_sample
from resources.reward_loop import RewardLoop, RewardStoppedError
from resources.reward_scores import Grade, Moments, combine, shape_scores

GRADERS = """
import time
from dataclasses import dataclass

@dataclass(frozen=True)
class Score:
    value: object
    reason: str = ""

calls = 0
def right(response, answer): return float(response == answer)
def length(extra, *, scale=1.0): return extra["response_length"] * scale
def fragile(response):
    if response == "raise": raise RuntimeError("no verdict")
    if response == "hang": time.sleep(60)
    if response == "none": return None
    if response == "nan": return float("nan")
    if response == "text": return "very good"
    if response == "own": return Score(None, "grader error: KeyError 'entry'")
    return Score(1.0)
def second_time(response, extra):
    import os, pathlib
    mark = pathlib.Path(extra["folder"]) / response
    if not mark.exists():
        mark.write_text(""); raise RuntimeError("first time")
    return 1.0
def rank(responses):
    order = sorted(responses, key=len)
    return [order.index(one) / max(1, len(responses) - 1) for one in responses]
def ones(responses, extra):
    import array
    kind = extra["kind"]
    return {"6": [1.0] * 6, "1": [1.0], "5": [1.0] * 5, "7": [1.0] * 7, "float": 1.0, "column": [[1.0]] * 6}[kind]
def slow(response): time.sleep(0.3); return 1.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "loop_graders.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "loop_graders"


@pytest.fixture
def open_loop(module: str) -> Iterator[Callable[..., RewardLoop]]:
    loops: list[RewardLoop] = []

    def make(*graders: Grader, processes: int = 2) -> RewardLoop:
        loops.append(RewardLoop(graders, processes))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


def grader(function: str, name: str = "g", **more: Any) -> Grader:
    fields: dict[str, Any] = {
        "name": name,
        "kind": "python",
        "function": f"loop_graders:{function}",
        "timeout_seconds": 20.0,
    }
    return Grader(**{**fields, **more})


def sample(row_id: int, response: str, answer: str = "", group_id: int | None = None, **extra: Any) -> Sample:
    record = {"prompt": "p", "answer": answer, "source": extra.pop("source", "math"), "index": 0, "extra": extra}
    row = FinishedRow(
        row_id=row_id,
        group_id=row_id if group_id is None else group_id,
        record=json.dumps(record).encode(),
        response_ids=tuple(range(len(response))),
    )
    return read_sample(row, response)


def scores(loop: RewardLoop, samples: Sequence[Sample], name: str = "g") -> list[float | str]:
    """The score of each sample, or the cause why there is none."""
    found = loop.finish("b", samples, 60.0).grades
    grades = [found[one.row_id][name] for one in samples]
    return [grade.score if grade.cause is None else grade.cause for grade in grades]


def test_failures_stay_with_their_rows(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(grader("fragile", timeout_seconds=1.0))
    words = ["fine", "raise", "hang", "none", "nan", "text", "own", "fine"]
    expected = [1.0, "error", "timeout", "nonsense", "nonsense", "nonsense", "error", 1.0]
    assert scores(loop, [sample(row, word) for row, word in enumerate(words)]) == expected


def test_the_cause_names_the_function_and_the_row(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(grader("fragile"))
    found = loop.finish("b", [sample(7, "raise")], 60.0).grades[7]["g"]
    assert found.text == "grader 'g', error: row 7: loop_graders:fragile raised RuntimeError: no verdict"


@pytest.mark.parametrize("begun", [0, 5, 12])
def test_scores_do_not_depend_on_what_was_begun_or_in_which_order(open_loop: Callable[..., RewardLoop], begun: int):
    loop = open_loop(grader("right"), grader("rank", name="r", is_group_wise=True))
    batch = [sample(row, "x" * (row % 5), "xx", group_id=row // 4) for row in range(12)]
    shuffled = random.Random(begun).sample(batch, 12)
    for one in shuffled[:begun]:
        loop.begin("b", [one], {one.group_id: 4})
    found = loop.finish("b", shuffled, 60.0).grades
    assert [found[row]["g"].score for row in range(12)] == [float(row % 5 == 2) for row in range(12)]
    assert [found[row]["r"].score for row in range(4)] == [0.0, 1 / 3, 2 / 3, 1.0]


def test_another_response_under_a_begun_row_is_graded_anew(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(grader("right"))
    loop.begin("b", [sample(0, "wrong", "4"), sample(1, "4", "4")])
    assert scores(loop, [sample(0, "4", "4"), sample(1, "4", "4")]) == [1.0, 1.0]


def test_a_begun_row_that_is_dropped_is_left_out(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(grader("fragile", on_failure="stop"))
    loop.begin("b", [sample(0, "fine"), sample(1, "raise")])
    assert scores(loop, [sample(0, "fine")]) == [1.0]


def test_retry_calls_again_and_counts_both_calls(open_loop: Callable[..., RewardLoop], tmp_path: Path):
    loop = open_loop(grader("second_time", on_failure="retry", retries=1))
    found = loop.finish("b", [sample(0, "mark", folder=str(tmp_path))], 60.0).grades[0]["g"]
    assert found.score == 1.0
    assert len(found.seconds) == 2


def test_stop_ends_with_the_cause(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(grader("fragile", on_failure="stop"))
    with pytest.raises(RewardStoppedError, match=r"row 1: grader 'g', error: row 1: .* no verdict.*on_failure is stop"):
        loop.finish("b", [sample(0, "fine"), sample(1, "raise")], 60.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("6", [1.0] * 6), ("column", [1.0] * 6), *((kind, ["nonsense"] * 6) for kind in ("1", "5", "7", "float"))],
)
def test_a_group_takes_exactly_as_many_scores_as_responses(
    open_loop: Callable[..., RewardLoop], kind: str, expected: list[Any]
):
    loop = open_loop(grader("ones", is_group_wise=True))
    assert scores(loop, [sample(row, "x", group_id=0, kind=kind) for row in range(6)]) == expected


def test_a_wrong_length_says_function_got_and_expected():
    with pytest.raises(GraderFailedError, match="'m:f' returned 5 scores for 6 responses; it has to return 6"):
        check_scores([1.0] * 5, 6, "m:f", is_group=True)


def test_a_source_without_grader_is_refused_and_sources_keep_apart(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(
        grader("right", sources=("math",)), grader("length", name="l", sources=("code",), options={"scale": 0.5})
    )
    found = loop.finish("b", [sample(0, "4", "4"), sample(1, "1234", source="code")], 60.0).grades
    assert set(found[0]) == {"g"}
    assert {name: grade.score for name, grade in found[1].items()} == {"l": 2.0}
    with pytest.raises(ValueError, match="no grader scores data source 'chat'"):
        loop.finish("b", [sample(0, "4", "4", source="chat")], 60.0)


def test_what_is_not_graded_at_the_deadline_is_unscorable(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(grader("fragile"))
    found = loop.finish("b", [sample(0, "hang"), sample(1, "fine")], 1.0).grades
    assert found[0]["g"].text == "grader 'g', timeout: not graded within the 1 s that the batch had"
    assert found[1]["g"].score == 1.0


def test_a_deadline_stops_the_run_where_the_policy_says_so(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(grader("fragile", on_failure="stop"))
    with pytest.raises(RewardStoppedError, match=r"grader 'g': not graded within the 0\.5 s"):
        loop.finish("b", [sample(0, "hang")], 0.5)


def test_grading_before_finish_is_reported_as_hidden(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(grader("slow"))
    loop.begin("b", [sample(0, "a")])
    done = threading.Event()
    done.wait(1.0)
    hidden = loop.finish("b", [sample(0, "a")], 60.0).hidden_seconds
    assert 0.3 <= hidden < 0.9
    assert loop.finish("c", [sample(0, "a")], 60.0).hidden_seconds == 0.0


def test_only_so_many_unfinished_batches_are_kept(open_loop: Callable[..., RewardLoop]):
    loop = open_loop(grader("right"))
    for number in range(20):
        loop.begin(f"b{number}", [sample(0, "4", "4")])
    assert scores(loop, [sample(0, "4", "4")]) == [1.0]
    assert len(loop._batches) <= 8


def test_siblings_meet_on_one_rank():
    assert [owner_of(group, 3) for group in range(6)] == [0, 1, 2, 0, 1, 2]


def test_one_missing_grade_makes_the_row_unscorable_and_weights_count():
    graders = [Grader(name="a", kind="rule", weight=2.0), Grader(name="b", kind="rule", weight=-0.5)]
    one = sample(0, "x")
    assert combine(one, {"a": Grade(score=1.0), "b": Grade(score=1.0)}, graders) == 1.5
    assert math.isnan(combine(one, {"a": Grade(score=1.0), "b": Grade(score=math.nan, cause="error")}, graders))


def test_moments_merge_to_those_of_all_scores():
    left, right = Moments.of([1.0, 2.0, math.nan]), Moments.of([6.0])
    merged = left + right
    assert (merged.count, merged.mean) == (3, 3.0)
    assert merged.std == pytest.approx(math.sqrt(14 / 3))
    assert Moments.from_json(merged.to_json()) == merged


def test_scaling_comes_before_clipping_and_nan_stays():
    assert shape_scores([8.0, -1.0], 2.0, 3.0) == [3.0, -0.5]
    assert math.isnan(shape_scores([math.nan], 2.0, 3.0)[0])
