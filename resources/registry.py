"""What a run has told the cluster about itself, in Ray's own key-value store: the run, and a card per worker group.

No process holds it, so it can be read while every worker is busy, and after the controller is gone.
"""

from ray.experimental import internal_kv

_NAMESPACE = b"callsheet"


def write_card(kind: str, run_id: str, name: str, card: bytes, is_new: bool) -> bool:
    """Store a card. With `is_new` an existing one stays, and the answer is False."""
    existed = internal_kv._internal_kv_put(_key(kind, run_id, name), card, overwrite=not is_new, namespace=_NAMESPACE)
    return not (is_new and existed)


def read_card(kind: str, run_id: str, name: str) -> bytes | None:
    """A card, or None."""
    return internal_kv._internal_kv_get(_key(kind, run_id, name), namespace=_NAMESPACE)


def drop_card(kind: str, run_id: str, name: str) -> None:
    """Remove a card that may or may not be there."""
    internal_kv._internal_kv_del(_key(kind, run_id, name), namespace=_NAMESPACE)


def list_cards(kind: str, run_id: str | None = None) -> list[tuple[str, str]]:
    """(run id, name) of every card of a kind."""
    prefix = f"{kind}/" if run_id is None else f"{kind}/{run_id}/"
    keys = internal_kv._internal_kv_list(prefix.encode(), namespace=_NAMESPACE)
    found = [key.decode().split("/", 2) for key in keys]
    return sorted((parts[1], parts[2]) for parts in found)


def drop_run(run_id: str) -> None:
    """Remove every card of a run."""
    for kind in ("group", "run"):
        for _, name in list_cards(kind, run_id):
            drop_card(kind, run_id, name)


def _key(kind: str, run_id: str, name: str) -> bytes:
    return f"{kind}/{run_id}/{name}".encode()
