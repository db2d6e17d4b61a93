"""The software switch in Python: the readable machine behind a real socket. Slow; the place where a new idea is tried first."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from netsum.protocol.fixed_point import MAX_WORLD_SIZE
from netsum.protocol.job_actions import DatapathFeatures, OpenJob
from netsum.protocol.switch_machine import Address, Output, SwitchJobConfig, SwitchMachine
from netsum.protocol.wire import data_bytes
from netsum.switch.datapaths.base import DatapathSettings, random_multicast_group

log = logging.getLogger("netsum.switch")

BATCH_DATAGRAMS = 64  # handled at a time; others get the lock in between
MAX_DATAGRAM_BYTES = data_bytes(2048)
# The socket module has no names for these two Linux values.
IP_MTU_DISCOVER = 10
IP_PMTUDISC_DO = 2

Endpoint = tuple[str, int]


@dataclass(slots=True)
class _Route:
    """Where a job's results go."""

    workers: tuple[Endpoint, ...]
    group: Endpoint | None
    multicast: bool = False

    @property
    def destinations(self) -> tuple[Endpoint, ...]:
        return (self.group,) if self.multicast and self.group else self.workers


class PythonDatapath:
    """See :class:`netsum.switch.datapaths.base.Datapath`. One thread; the lock guards machine, routes and counters."""

    name = "python"

    def __init__(self, settings: DatapathSettings) -> None:
        self._machine = SwitchMachine()
        self._routes: dict[int, _Route] = {}
        self._socket_counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._socket = _open_socket(settings)
        host, port = self._socket.getsockname()
        prefix, group_port = random_multicast_group() if settings.multicast else ("", 0)
        self._features = DatapathFeatures(
            data_host=host,
            data_port=port,
            max_world_size=MAX_WORLD_SIZE,
            max_chunk_elems=settings.max_chunk_elems,
            multicast_prefix=prefix,
            multicast_port=group_port,
        )
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="netsum-datapath", daemon=True)
        self._thread.start()

    @property
    def features(self) -> DatapathFeatures:
        return self._features

    @property
    def receive_buffer_bytes(self) -> int:
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2  # the kernel reports twice the grant

    # -- jobs ------------------------------------------------------------------------------------------------------

    def open_job(self, job: OpenJob) -> None:
        workers = tuple(Address(_ip_number(host), port) for host, port in job.workers)
        config = SwitchJobConfig(job.job_number, job.epoch, job.slot_base, job.slots, job.chunk_elems, workers)
        with self._lock:
            self._machine.open_job(config)
            self._machine.set_multicast(job.job_number, job.multicast is not None)
            self._routes[job.job_number] = _Route(job.workers, job.multicast)

    def set_results(self, job_number: int, multicast: bool) -> None:
        with self._lock:
            self._routes[job_number].multicast = multicast

    def close_job(self, job_number: int) -> None:
        with self._lock:
            self._machine.close_job(job_number)
            self._routes.pop(job_number, None)

    # -- what is going on ------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        with self._lock:
            return {**self._machine.counters, **self._socket_counters}

    def job_counters(self, job_number: int) -> dict[str, int]:
        with self._lock:
            return self._machine.job_counters(job_number)

    def slots_in_use(self, job_number: int) -> int:
        with self._lock:
            return self._machine.slots_in_use(job_number)

    def awaited_ranks(self, job_number: int) -> Sequence[int]:
        with self._lock:
            return list(self._machine.awaited_ranks(job_number))

    def close(self) -> None:
        if self._thread.is_alive():
            self._wake_write.send(b"\0")
            self._thread.join()
        for opened in (self._socket, self._wake_read, self._wake_write):
            opened.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            wake = selector.register(self._wake_read, selectors.EVENT_READ)
            while all(key is not wake for key, _ in selector.select()):
                with self._lock:
                    self._batch()

    def _batch(self) -> None:
        for _ in range(BATCH_DATAGRAMS):
            try:
                datagram, (host, port) = self._socket.recvfrom(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:  # an ICMP error that an earlier datagram of ours caused
                self._socket_counters["socket_refused"] += 1
                continue
            try:
                outputs = self._machine.handle(datagram, Address(_ip_number(host), port))
            except Exception:  # a bug of ours must not take other jobs down
                self._socket_counters["internal_errors"] += 1
                log.exception("datagram of %d bytes from %s:%d", len(datagram), host, port)
                continue
            for output in outputs:
                self._send(output)

    def _send(self, output: Output) -> None:
        route = self._routes[output.job_number]
        destinations: tuple[Endpoint, ...]
        if output.destination is not None:
            destinations = ((_ip_text(output.destination.ip), output.destination.port),)
        elif output.kind == "probe_all":
            destinations = (route.group,) if route.group else ()
        else:
            destinations = route.destinations
        for destination in destinations:
            try:
                self._socket.sendto(output.datagram, destination)
            except OSError:  # a full queue or a host that is gone: lost, as on any network; the worker asks again
                self._socket_counters["socket_send_dropped"] += 1


def _open_socket(settings: DatapathSettings) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.receive_buffer_bytes)
        opened.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        opened.bind((settings.host, settings.port))
        if settings.multicast:
            with contextlib.suppress(OSError):  # then nobody hears the group in the probe, and results go by unicast
                opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(settings.host))
        opened.setblocking(False)
    except OSError:
        opened.close()
        raise
    return opened


def _ip_number(host: str) -> int:
    return int.from_bytes(socket.inet_aton(host), "big")


def _ip_text(ip: int) -> str:
    return socket.inet_ntoa(ip.to_bytes(4, "big"))
