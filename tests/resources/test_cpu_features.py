"""Which CPUs multiply bfloat16 in hardware, by what Linux says of them."""

from pathlib import Path

import pytest

from resources.cpu_features import multiplies_bfloat16


@pytest.mark.parametrize(
    ("text", "has_it"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_vnni\n", False),
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n", True),
        ("processor : 0\nflags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("processor : 0\nflags\t\t: fpu amx_tile amx_int8\n", False),
        ("processor : 0\nFeatures\t: fp asimd bf16 i8mm\n", True),
        ("processor : 0\nFeatures\t: fp asimd i8mm\n", False),
        ("processor : 0\n", True),  # no flags are told
    ],
)
def test_the_flags_of_the_kernel_decide(tmp_path: Path, text: str, has_it: bool):
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is has_it


def test_a_machine_without_such_a_file_is_not_held_to_be_slow(tmp_path: Path):
    assert multiplies_bfloat16(tmp_path / "missing")
