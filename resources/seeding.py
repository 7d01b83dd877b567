"""Seeds that depend on what is computed and never on who computes it or when."""

import hashlib


def row_seed(run_seed: int, iteration: int, row_id: int) -> int:
    """The sampling seed of one row: a 63-bit integer from (run seed, iteration, row id).

    Rank, engine and time play no part, so a row draws the same noise wherever it runs and whenever it is replayed;
    two rows of a batch never share theirs, since one seed for a whole batch gives every row the same noise.
    """
    return _seed("row", run_seed, iteration, row_id)


def stream_seed(run_seed: int, name: str, index: int = 0) -> int:
    """A 63-bit seed for a named stream of the run, for example ("shuffle", epoch)."""
    return _seed(name, run_seed, index)


def _seed(name: str, *numbers: int) -> int:
    text = ":".join([name, *(str(int(number)) for number in numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
