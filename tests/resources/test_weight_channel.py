"""Where the bytes of a weight channel lie."""

import concurrent.futures

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from resources.weight_channel import NO_CARD, agreed_device


@pytest.mark.parametrize(
    ("cards", "device"),
    [
        (["GPU-a", "GPU-b"], "cuda"),
        (["GPU-a", NO_CARD], "cpu"),
        ([NO_CARD, "GPU-b"], "cpu"),
        ([NO_CARD, NO_CARD], "cpu"),
        (["GPU-a", "GPU-b", "GPU-a"], "cpu"),
    ],
)
def test_the_ends_of_a_channel_agree_on_host_memory_unless_each_has_an_accelerator_of_its_own(cards, device):
    store, size = HashStore(), len(cards)
    with concurrent.futures.ThreadPoolExecutor(max_workers=size) as ends:
        found = list(ends.map(lambda rank: agreed_device(store, rank, size, cards[rank]).type, range(size)))
    assert found == [device] * size
