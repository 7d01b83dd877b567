"""Keeps what a library changes in the whole process while it is imported or started."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore thread count, `torch.set_num_threads`, default dtype and the random streams on the way out.

    vLLM's CPU worker replaces `torch.set_num_threads` by a function that does nothing, and its start seeds every random
    stream; a trainer in the same process would go on with one thread count and other random numbers. Warnings that
    the library makes meanwhile are about its own use of others; they are dropped.
    """
    set_num_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads
        set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
