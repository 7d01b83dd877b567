"""Whether an HTTP API answers, asked from the node where this runs; imports nothing, so that any process may ask."""

import urllib.error
import urllib.request


def probe_api(url: str, timeout_seconds: float = 5.0) -> str | None:
    """None when the API at `url` answers its health check here, else why not."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=timeout_seconds) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except (urllib.error.URLError, OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
