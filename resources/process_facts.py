"""What the kernel says of a process: whether it lives, CPU time gained, memory kills."""

import os
from collections.abc import Iterable
from pathlib import Path

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")


def host_identity() -> str:
    """Equal for processes that see each other's pids: the kernel's boot and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command may hold spaces and brackets; the fields begin after its last one.
    return text.rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process; None when it is gone."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def cpu_seconds_of(pids: Iterable[int]) -> dict[int, float | None]:
    """CPU time of several processes."""
    return {pid: cpu_seconds(pid) for pid in pids}


def memory_kills() -> int:
    """How often the kernel has killed for memory in this container since it started."""
    if not _CGROUP_EVENTS.is_file():
        return 0
    counts = dict(line.split() for line in _CGROUP_EVENTS.read_text().splitlines())
    return int(counts.get("oom_kill", 0))


def processes_with_environment(key: str, value: str | None = None) -> dict[int, str]:
    """pid -> value for every process of this user whose environment sets `key` (to `value`, when given)."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
        for pair in environment.split(b"\0"):
            name, _, text = pair.partition(b"=")
            if name == key.encode() and (value is None or text == value.encode()):
                found[int(entry.name)] = text.decode(errors="replace")
    return found


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 when it is gone."""
    fields = _stat_fields(pid)
    return 0 if fields is None else int(fields[19])


def descendants(pids: Iterable[int]) -> set[int]:
    """Children of these processes, their children, and so on; zombies left out."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields is not None and fields[0] not in ("Z", "X"):
                parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    grown = set(pids)
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in grown} - found
        found |= grown
    return found
