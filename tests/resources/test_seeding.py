"""Seeds depend on what is computed, never on who computes it."""

from resources.seeding import row_seed, stream_seed


def test_every_row_of_a_batch_has_a_seed_of_its_own():
    # 48 prompts x 16 responses, whoever samples them.
    assert len({row_seed(0, 0, row) for row in range(48 * 16)}) == 768


def test_seeds_change_with_run_seed_and_iteration():
    seeds = {row_seed(run, iteration, 5) for run in range(3) for iteration in range(4)}
    assert len(seeds) == 12


def test_seeds_fit_in_63_bits_and_are_stable():
    assert all(0 <= row_seed(run, 1, row) < 2**63 for run in range(10) for row in range(100))
    assert row_seed(1, 2, 3) == row_seed(1, 2, 3)


def test_engines_start_with_seeds_of_their_own():
    assert len({stream_seed(100, "engine", index) for index in range(3)}) == 3


def test_streams_of_one_index_do_not_share_a_seed():
    assert stream_seed(0, "shuffle", 1) != stream_seed(0, "engine", 1)
