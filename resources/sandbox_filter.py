"""The system call filter of the sandbox, as a BPF program for `bwrap --seccomp`.

Denied (EPERM): what changes its core or scheduling, makes namespaces or mounts, traces, loads code into the kernel, or
reaches kernel keyrings. `clone3` hides its flags from a filter and is answered ENOSYS; the C library then uses `clone`,
whose flags for new namespaces are denied.
"""

import platform
import struct

_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCH, _ARG0 = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000

_DENIED = {
    "x86_64": {
        "ptrace": 101, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203, "mount": 165,
        "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "add_key": 248,
        "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "process_vm_readv": 310, "process_vm_writev": 311, "init_module": 175, "finit_module": 313, "kexec_load": 246,
        "io_uring_setup": 425, "open_by_handle_at": 304, "sched_setattr": 314, "move_mount": 429, "fsopen": 430,
        "open_tree": 428, "mount_setattr": 442, "mbind": 237, "migrate_pages": 256, "move_pages": 279,
        "ioprio_set": 251, "acct": 163, "quotactl": 179, "personality": 135,
    },
    "aarch64": {
        "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "mount": 40,
        "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "add_key": 217,
        "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "process_vm_readv": 270, "process_vm_writev": 271, "init_module": 105, "finit_module": 273, "kexec_load": 104,
        "io_uring_setup": 425, "open_by_handle_at": 265, "sched_setattr": 274, "move_mount": 429, "fsopen": 430,
        "open_tree": 428, "mount_setattr": 442, "mbind": 235, "migrate_pages": 238, "move_pages": 239,
        "ioprio_set": 30, "acct": 89, "quotactl": 60, "personality": 92,
    },
}  # fmt: skip
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435


def seccomp_program(machine: str | None = None) -> bytes:
    """The filter for this machine. Raises ValueError for an architecture without a table."""
    machine = machine or platform.machine()
    if machine not in _DENIED:
        raise ValueError(f"no system call table for {machine!r}; the sandbox knows {sorted(_DENIED)}")
    code = [
        _step(_LOAD, 0, 0, _ARCH),
        _step(_JEQ, 1, 0, _AUDIT[machine]),
        _step(_RET, 0, 0, _KILL),
        _step(_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the x32 calling convention would go round the numbers below
        code += [_step(_JGE, 0, 1, _X32), _step(_RET, 0, 0, _KILL)]
    code += [_step(_JEQ, 0, 1, _CLONE3), _step(_RET, 0, 0, _ERRNO | _ENOSYS)]
    for number in sorted(_DENIED[machine].values()):
        code += [_step(_JEQ, 0, 1, number), _step(_RET, 0, 0, _ERRNO | _EPERM)]
    code += [
        _step(_JEQ, 0, 3, _CLONE[machine]),
        _step(_LOAD, 0, 0, _ARG0),
        _step(_JSET, 0, 1, _NEW_NAMESPACES),
        _step(_RET, 0, 0, _ERRNO | _EPERM),
        _step(_RET, 0, 0, _ALLOW),
    ]
    return b"".join(code)


def _step(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
