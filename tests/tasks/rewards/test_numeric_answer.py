from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rewards.boxed import last_boxed
from tasks.rewards.number_parsing import parse_numbers
from tasks.rewards.numeric_answer import extract_numbers, numeric_answer


def grade(response: str, answer: str) -> float | None:
    return numeric_answer("", response, answer, {}).value


@pytest.mark.parametrize(
    ("response", "score"), [("#### -3", 1.0), ("#### 3", 0.0), ("so it is -3.", 1.0), ("#### +3", 0.0)]
)
def test_the_sign_counts(response: str, score: float) -> None:
    assert grade(response, "#### -3") == score


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[8.124,12.852]", ["8.124", "12.852"]),
        ("[8.124, 12.852]", ["8.124", "12.852"]),
        ("so we get [8.124,12.852].", ["8.124", "12.852"]),
        ("1,234", ["1234"]),
        ("1,2,3", ["1", "2", "3"]),
        ("100,200", ["100200"]),
        ("[100,200]", ["100", "200"]),
        (r"\boxed{\{1, 2\}}", ["1", "2"]),
        ("-1,234.5", ["-1234.5"]),
        ("He ran 1,234,567 miles", ["1234567"]),
        (r"\boxed{1,\!234}", ["1234"]),
        (r"\boxed{1{,}234}", ["1234"]),
        ("12,34", ["12", "34"]),
    ],
)
def test_a_comma_separates_thousands_or_answers_and_is_never_just_dropped(text: str, numbers: list[str]) -> None:
    assert extract_numbers(text) == [Fraction(number) for number in numbers]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"first \boxed{2} then \boxed{3}", "3"),
        (r"\boxed{840}. so \boxed{840}", "840"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    ],
)
def test_the_last_box_stands(response: str, answer: str) -> None:
    assert grade(response, answer) == 1.0


def test_an_earlier_box_or_both_together_are_not_the_answer() -> None:
    assert grade(r"first \boxed{3} then \boxed{2}", "3") == 0.0
    assert grade(r"\boxed{840} \boxed{840}", "840840") == 0.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a{b{c}}d} x", "a{b{c}}d"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed {4}", "4"),
        (r"\fbox{5}", "5"),
        ("none", None),
        ("}}{{", None),
    ],
)
def test_braces_of_a_box_are_matched(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("4", r"$4\sqrt(2)$", 0.0),
        ("2", r"$4\sqrt(2)$", 0.0),
        ("4", r"\boxed{4\sqrt{2}}", 0.0),
        ("3", r"\boxed{3\pi}", 0.0),
        ("3", r"\boxed{3pi}", 0.0),
        ("5", r"\boxed{5x}", 0.0),
        ("8", r"\boxed{2^3}", 0.0),
        ("8", r"so it is \log 8", 0.0),
        ("8", r"so it is \log_{2} 8", 0.0),
        ("2", r"so it is \sqrt 2", 0.0),
        ("8", r"so it is \approx 8", 1.0),
        ("80000", r"\$80,000", 1.0),
        (r"\frac{2}{3}", "2/3", 1.0),
        (r"\frac12", r"\frac{1}{2}", 1.0),
        (r"\dfrac{1}{2}", "0.5", 1.0),
        ("1/3", "0.333", 0.0),
        ("1.5", r"1\frac{1}{2}", 1.0),
        ("1500", r"1.5\times 10^{3}", 1.0),
    ],
)
def test_latex_is_read_whole_or_not_at_all(answer: str, response: str, score: float) -> None:
    assert grade(response, answer) == score


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "$42",
        "42 dollars",
        r"\boxed{42\text{ cm}}",
        r"42\%",
        "x = 42",
        r"\( 42 \)",
        "**42**",
        "42kg",
        "It is 42.",
        "42.0",
        r"\boxed{42 \text{ m}^2}",
        r"42^\circ",
        "#### 42 apples\nmore text",
        "10 + 32 = 42",
        "4.2e1",
        "$42$",
    ],
)
def test_units_currency_and_decoration_do_not_change_a_number(text: str) -> None:
    assert extract_numbers(text) == [Fraction(42)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-$3", -3),
        ("$-3$", -3),
        ("5-3", 3),
        ("a total of 5 - 3", 3),
        ("x=-3.", -3),
        ("\N{MINUS SIGN}7", -7),
        ("10-20", 20),
    ],
)
def test_a_minus_is_a_sign_or_an_operator(text: str, number: int) -> None:
    assert extract_numbers(text) == [Fraction(number)]


def test_equality_is_exact_for_tiny_and_huge_numbers() -> None:
    assert grade("1e-99", "1e-98") == 0.0
    assert grade("1000000000000000001", "1000000000000000000") == 0.0
    assert grade("0.1000", "1/10") == 1.0


def test_an_answer_without_a_number_is_unscorable_and_a_response_without_one_is_wrong() -> None:
    unscorable = numeric_answer("", "5", "no number", {})
    assert unscorable.value is None
    assert "holds no number" in unscorable.reason
    wrong = numeric_answer("", "no idea", "5", {})
    assert (wrong.value, wrong.reason) == (0.0, "no number in the response")
    assert grade("1/0", "5") == 0.0


@settings(deadline=None)
@given(st.integers(-(10**15), 10**15))
def test_every_integer_is_found_in_every_dress(number: int) -> None:
    for text in (f"{number}", f"#### {number:,}", rf"thus \boxed{{{number}}}", f"so the result is {number}."):
        assert extract_numbers(text) == [Fraction(number)]


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="0123456789.,-+$\\{}[]()/^ eboxdfrac#=\n", max_size=60))
def test_no_text_makes_it_raise(text: str) -> None:
    extract_numbers(text)
    parse_numbers(text)


@pytest.mark.parametrize("piece", ["1", "1,", " ", "-", r"\frac", "[1,", r"\boxed{", "{", "a=", r"\text{", "1.", "1 "])
def test_long_hostile_text_is_no_number(piece: str) -> None:
    """Quadratic matching would show as a test that does not end."""
    numbers = extract_numbers(piece * 20_000)
    assert numbers is None or all(abs(number) < 10**1000 for number in numbers)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1\,234}", "1234"),
        (r"\boxed{12\;345\;678}", "12345678"),
        ("it is 1\u202f234.", "1234"),
        ("it is 1\u00a0234 apples", "1234"),
        ("12\u2009345.5", "12345.5"),
        (r"it is 12\,km", "12"),
        ("call 555\u00a01234", "1234"),
    ],
)
def test_a_thin_space_stands_between_thousands_and_nowhere_else(response: str, answer: str) -> None:
    assert grade(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [("½", "1/2"), ("-2½", "-2.5"), ("it is ⅔ of it", "2/3"), ("1⁄2", "0.5"), ("1/-2", "-0.5"), ("-1/-2", "0.5")],
)
def test_a_fraction_counts_however_it_is_written(response: str, answer: str) -> None:
    assert grade(response, answer) == 1.0


def test_a_raised_digit_is_no_number_of_its_own() -> None:
    assert grade("3²", "32") == 0.0
    assert grade("²", "2") == 0.0
