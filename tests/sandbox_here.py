"""Whether this machine can make the sandbox's boxes, for tests that need one."""

from resources.sandbox import Sandbox, SandboxLimits, SandboxUnavailableError


def why_no_sandbox() -> str | None:
    """None where boxes can be made, else the reason."""
    try:
        Sandbox(SandboxLimits(), 1)
    except SandboxUnavailableError as error:
        return str(error)
    return None
