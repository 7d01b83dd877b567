"""The slow tests, a file a process: each starts and ends clusters and servers of its own.

    python -m tests.slow                              # all of them
    python -m tests.slow --seconds 480 [--seed HASH]  # what fits into the time, in an order chosen by the commit's hash

A file is not begun once the time is up; what was left out is named. Files that judge what holds a step back are no part
of a part: beside other work the right verdict is another one.
"""

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTHING_COLLECTED = 5
MARK = "mark.slow"
QUIET_ONLY = ("test_planted.py",)


def slow_files() -> list[Path]:
    """Test files with a slow test, without the chaos tests, which have a command of their own."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(file for file in found if MARK in file.read_text() and file.parent.name != "chaos")


def commit() -> str:
    """Hash of what is checked out."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def run(file: Path) -> bool:
    """Whether the slow tests of one file pass."""
    name = str(file.relative_to(ROOT))
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=20", name]
    ended = subprocess.run([*command, "-m", "slow and not gpu"], cwd=ROOT, check=False)
    return ended.returncode in (0, NOTHING_COLLECTED)


def main() -> int:
    """0 when all that ran passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--seed", default=None)
    options = parser.parse_args()
    files = slow_files()
    if options.seconds is not None:
        seed = options.seed or commit()
        print(f"slow tests in the order of seed {seed}, for {options.seconds:g} s", flush=True)
        files = [file for file in files if file.name not in QUIET_ONLY]
        files.sort(key=lambda file: hashlib.sha256(f"{seed}{file.name}".encode()).digest())
    begun, failed, left_out = time.monotonic(), [], []
    for file in files:
        if options.seconds is not None and time.monotonic() - begun > options.seconds:
            left_out.append(file.stem)
        elif not run(file):
            failed.append(file.stem)
    print(f"left out: {', '.join(left_out) or 'nothing'}; failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
