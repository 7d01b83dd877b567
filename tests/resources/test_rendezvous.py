"""The stores where ranks meet."""

from resources.rendezvous import host_store


def test_stores_opened_before_anyone_uses_them_have_ports_of_their_own():
    opened = [host_store("127.0.0.1", 1, 10.0) for _ in range(3)]
    assert len({address for _, address in opened}) == 3
    for store, (_, port) in opened:
        store.set("port", str(port))
        assert store.get("port") == str(port).encode()
