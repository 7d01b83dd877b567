"""What the instructions of a CPU can compute in."""

from pathlib import Path

_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""x86's two, and Arm's, as Linux names them."""


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU has instructions for products of bfloat16 numbers.

    Without them torch and vLLM convert in software, and a product of matrices takes several times what it takes in
    float32. True where the kernel tells no flags: nothing is known against it.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    flags = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return not flags or not _FLAGS.isdisjoint(flags[0])
