"""How ranks meet, and who is refused (case C35)."""

import re
import socket
import threading
import time

import pytest

from netsum.host_agent.coordinator import Coordinator
from netsum.host_agent.mesh import Mesh
from netsum.host_agent.peer_messages import Hello, PathVote
from netsum.host_agent.rendezvous import Identity, Registry, default_port, rendezvous_address
from netsum.host_agent.settings import Settings
from netsum.protocol.errors import JoinRefusedError, RendezvousError, UsageError
from tests.ranks import all_good, free_port, run_ranks


def meet(identity: Identity, port: int, timeout_s: float) -> Mesh:
    mesh = Mesh(identity, Coordinator(identity.rank, identity.world_size), silence_timeout_s=10)
    mesh.connect("127.0.0.1", port, time.monotonic() + timeout_s, with_ring=False)
    return mesh


def end(mesh: Mesh) -> None:
    mesh.close(Coordinator(0, 1).bye())


class TestAddress:
    def test_order_of_sources(self):
        everything = Settings(rendezvous="a:1", master_addr="m", master_port="29500")
        assert rendezvous_address("x:7", "j", None, everything) == ("x", 7)
        assert rendezvous_address(None, "j", None, everything) == ("a", 1)
        port = default_port("j", "29500")
        assert rendezvous_address(None, "j", "10.0.0.1", Settings(master_addr="m", master_port="29500")) == ("m", port)
        assert rendezvous_address(None, "j", "127.0.0.1", Settings()) == ("127.0.0.1", default_port("j"))
        assert rendezvous_address(None, "j", None, Settings()) == ("127.0.0.1", default_port("j"))

    def test_port_is_in_its_range_and_depends_on_job_and_master_port(self):
        ports = {default_port(f"job{i}", str(p)) for i in range(20) for p in range(20)}
        assert len(ports) > 300
        assert all(20_000 <= port < 30_000 for port in ports)

    def test_a_remote_switch_needs_a_rendezvous(self):
        with pytest.raises(UsageError, match="NETSUM_RENDEZVOUS"):
            rendezvous_address(None, "j", "10.0.0.1", Settings())

    @pytest.mark.parametrize("text", ["host", "host:", ":5", "host:99999", "host:x"])
    def test_malformed(self, text):
        with pytest.raises(UsageError, match="host:port"):
            rendezvous_address(text, "j", None, Settings())


class TestRegistry:
    def hello(self, **changes):
        fields = {"job": "j", "rank": 1, "world_size": 3, "host": "h", "port": 5, "host_name": "box", "pid": 9}
        return Hello(**(fields | changes))

    @pytest.mark.parametrize(
        ("changes", "code", "said"),
        [
            ({"job": "other"}, "other_job", ["'other'", "'j'"]),
            ({"world_size": 2}, "world_size", ["is 2", "is 3"]),
            ({"rank": 5}, "rank_range", ["rank 5", "0..2"]),
            ({"rank": -1}, "rank_range", ["0..2"]),
            ({"rank": 0}, "duplicate_rank", ["rank 0", "127.0.0.1:77"]),
        ],
    )
    def test_refusals_name_both(self, changes, code, said):
        registry = Registry(Identity("j", 0, 3), "127.0.0.1", 77, "box", 1)
        refused = registry.admit(object(), self.hello(**changes), "10.0.0.9:1234", b"")
        assert refused.code == code
        for words in ["10.0.0.9:1234", "127.0.0.1:77", *said]:
            assert words in refused.text
        assert registry.notes == [refused.text]
        assert registry.missing_ranks == [1, 2]

    def test_a_duplicate_names_both_addresses_and_a_lost_worker_frees_its_rank(self):
        registry = Registry(Identity("j", 0, 3), "127.0.0.1", 77, "box", 1)
        first, second = object(), object()
        assert registry.admit(first, self.hello(), "10.0.0.1:11", b"") is None
        refused = registry.admit(second, self.hello(), "10.0.0.2:22", b"")
        assert "10.0.0.1:11" in refused.text
        assert "10.0.0.2:22" in refused.text
        assert registry.forget(second) is None
        assert registry.forget(first) == 1
        assert registry.admit(second, self.hello(), "10.0.0.2:22", b"") is None

    def test_secret(self):
        registry = Registry(Identity("j", 0, 3, "s"), "127.0.0.1", 77, "box", 1)
        assert registry.admit(object(), self.hello(proof=b"guess"), "a:1", b"nonce").code == "secret"


class TestMesh:
    @pytest.mark.parametrize("n", [2, 3, 6])
    def test_all_meet_and_vote(self, n):
        port = free_port()

        def body(rank):
            mesh = meet(Identity("j", rank, n, "secret"), port, 10)
            everybody = mesh.vote(PathVote(True, ""), time.monotonic() + 5)
            found = mesh.peers, mesh.run_id, everybody
            barrier.wait(5)
            end(mesh)
            return found

        barrier = threading.Barrier(n)
        results = all_good(run_ranks(body, n))
        assert len({run_id for _, run_id, _ in results}) == 1
        for rank, (peers, _, objection) in enumerate(results):
            assert peers == [r for r in range(n) if r != rank]
            assert objection is None

    def test_two_ranks_zero(self):
        """C35: the second one is told of both, and the first one why it waits."""
        port = free_port()

        def body(position):
            time.sleep(0.3 * position)
            return meet(Identity("j", 0, 2), port, 3)

        first, second = run_ranks(body, 2)
        assert isinstance(second, JoinRefusedError)
        assert second.code == "duplicate_rank"
        assert f"127.0.0.1:{port}" in str(second)
        assert str(second).count("127.0.0.1:") == 2
        assert isinstance(first, RendezvousError)
        assert "ranks [1]" in str(first)
        assert "refused: rank 0 is there twice" in str(first)

    def test_a_wrong_world_size(self):
        """C35: ranks 0, 1, 2 of 3, where rank 1 says 2."""
        port = free_port()
        results = run_ranks(lambda rank: meet(Identity("j", rank, 2 if rank == 1 else 3), port, 3), 3)
        assert isinstance(results[1], JoinRefusedError)
        assert results[1].code == "world_size"
        assert "is 2" in str(results[1])
        assert "is 3" in str(results[1])
        for correct in (results[0], results[2]):
            assert isinstance(correct, RendezvousError)
            # Both give up at the same moment: rank 2 may be gone, and missing, when rank 0 says who is.
            assert re.search(r"ranks \[1(, 2)?\]", str(correct))
            assert "the world size is 2" in str(correct)

    def test_rank_out_of_range(self):
        """C35: rank 5 of 4."""
        port = free_port()
        results = run_ranks(lambda rank: meet(Identity("j", rank, 4), port, 2), [0, 5])
        assert isinstance(results[1], JoinRefusedError)
        assert results[1].code == "rank_range"
        assert "rank 5" in str(results[1])
        assert "world size is 4" in str(results[1])
        assert f"127.0.0.1:{port}" in str(results[1])

    def test_wrong_secret(self):
        port = free_port()
        results = run_ranks(lambda rank: meet(Identity("j", rank, 2, f"secret{rank}"), port, 2), 2)
        assert isinstance(results[1], JoinRefusedError)
        assert results[1].code == "secret"

    def test_a_late_duplicate_is_refused_while_the_job_runs(self):
        port = free_port()
        meshes = all_good(run_ranks(lambda rank: meet(Identity("j", rank, 2), port, 10), 2))
        with pytest.raises(JoinRefusedError, match="rank 1 is there twice"):
            meet(Identity("j", 1, 2), port, 3)
        with pytest.raises(JoinRefusedError, match="rank 0 is there twice"):
            meet(Identity("j", 0, 2), port, 3)
        assert meshes[0].peers == [1]
        all_good(run_ranks(lambda rank: end(meshes[rank]), 2))

    def test_a_worker_that_dies_before_the_job_is_complete_may_come_again(self):
        port = free_port()

        def body(rank):
            if rank == 1:
                with pytest.raises(RendezvousError, match=r"ranks \[2\]"):
                    meet(Identity("j", 1, 3), port, 2.5)
            if rank == 2:
                time.sleep(3)
            mesh = meet(Identity("j", rank, 3), port, 10)
            barrier.wait(5)
            end(mesh)
            return mesh.run_id

        barrier = threading.Barrier(3)
        assert len(set(all_good(run_ranks(body, 3)))) == 1

    def test_nobody_at_the_rendezvous(self):
        begin_s = time.monotonic()
        with pytest.raises(RendezvousError, match="rank 0 at 127"):
            meet(Identity("j", 1, 2), free_port(), 0.5)
        assert time.monotonic() - begin_s < 3

    def test_something_else_at_the_rendezvous(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            with pytest.raises(RendezvousError, match="says nothing"):
                meet(Identity("j", 1, 2), server.getsockname()[1], 1)
            with pytest.raises(RendezvousError, match="cannot listen"):
                meet(Identity("j", 0, 2), server.getsockname()[1], 1)

    def test_garbage_does_not_disturb_rank_zero(self):
        port = free_port()

        def body(rank):
            if rank == 1:
                for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\5hello", b"\xff" * 100):
                    time.sleep(0.1)
                    with socket.create_connection(("127.0.0.1", port), 2) as sock:
                        sock.sendall(garbage)
            mesh = meet(Identity("j", rank, 2), port, 10)
            barrier.wait(5)
            end(mesh)

        barrier = threading.Barrier(2)
        all_good(run_ranks(body, 2))
