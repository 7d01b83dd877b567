"""Solved prompts as a text."""

from resources.curriculum import curriculum_after, decode_solved, encode_solved, join_solved, solved_in


def test_keys_come_back_whatever_their_order():
    keys = ["a:b:12", "a:b:3", "x:0"]
    assert decode_solved(encode_solved(keys)) == set(keys)
    assert encode_solved(keys) == encode_solved(reversed(keys))
    assert encode_solved([]) == ""
    assert decode_solved("") == frozenset()


def test_ten_thousand_solved_prompts_fit_into_a_manifest():
    text = encode_solved(f"sorting:{index}" for index in range(0, 20_000, 2))
    assert len(text) < 8_000


def test_a_prompt_with_an_unscorable_response_is_not_solved():
    assert decode_solved(solved_in({"s:0": 1.0, "s:1": float("nan"), "s:2": 0.5}, 1.0)) == {"s:0"}


def test_solved_prompts_add_up_over_iterations():
    first = curriculum_after({}, {"reward": {"solved": encode_solved(["s:0"])}})
    second = curriculum_after(first, {"reward": {"solved": encode_solved(["s:7"])}, "rollout": {}})
    assert decode_solved(second["curriculum"]) == {"s:0", "s:7"}
    assert join_solved(second["curriculum"], "") == second["curriculum"]


def test_a_run_without_curriculum_keeps_no_state():
    assert curriculum_after({}, {"reward": {"rows": 4}}) == {}
