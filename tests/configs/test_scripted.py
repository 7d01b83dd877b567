"""What the script of the scripted engine may be."""

import pytest

from tests.configs.test_rules import problems, the_problem

GIVEN = "rollout.engine=scripted"


def responses(text: str) -> tuple[str, str]:
    return GIVEN, f"rollout.scripted={{responses: {{{text}}}}}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mode: answer, accuracy: 1.0",
        "mode: fixed, texts: {'*': a, '7': b, '7/2': c, '*/2': d}",
        "mode: random, lengths: one_long, min_length: 2, max_length: 9",
        "mode: answer, faults: [{kind: exit, engine: 0}]",
    ],
)
def test_a_script_that_can_answer_is_taken(text: str):
    assert problems("quickstart", *responses(text)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mode: perfect", "it must be one of random, answer, fixed"),
        ("mode: fixed", "texts is empty"),
        ("mode: fixed, texts: {foo: a}", "texts has 'foo'; a key is a prompt's index or '*'"),
        ("min_length: 9, max_length: 8", "min_length is 9 and max_length 8; raise max_length"),
        ("accuracy: 0.7", "accuracy is set and mode is 'random', which does not read it; use mode: answer"),
        ("mode: answer, texts: {'*': a}", "texts is set and mode is 'answer', which does not read it"),
        ("faults: [{kind: exit, engine: 1}]", "faults.0.engine is 1; engines are counted from 0, and there are 1"),
        ("faults: [{kind: sleep}]", "it must be one of raise, exit, hang, slow_row"),
    ],
)
def test_a_script_that_cannot_be_is_refused(text: str, said: str):
    assert said in the_problem("quickstart", *responses(text))
