"""The control server: a ZeroMQ ROUTER socket and a datapath, driven by the job table."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from types import TracebackType

import msgspec
import zmq

from netsum.protocol import control
from netsum.protocol.errors import NetsumIOError, UsageError
from netsum.protocol.job_actions import Action, CloseJob, Event, OpenJob, Reply, SendStatus, SetResults
from netsum.protocol.job_table import JobTable
from netsum.protocol.wire import IP_UDP_HEADER_BYTES, data_bytes, max_chunk_elems
from netsum.switch.datapaths.base import Datapath, DatapathSettings, datapath_factory
from netsum.switch.interface import interface_of
from netsum.switch.port_holder import port_holder
from netsum.switch.settings import SwitchSettings, parse_address, parse_control_endpoint
from netsum.switch.status import StatusSource, collect_status

log = logging.getLogger("netsum.switch")

BATCH_MESSAGES = 64  # handled between two looks at the clock
MAX_WAIT_US = 1_000_000
QUEUED_MESSAGES_PER_AGENT = 32  # replies that nobody reads are dropped beyond this
HANDSHAKE_TIMEOUT_MS = 5_000  # for a connection to speak ZeroMQ
CONNECTION_HEARTBEAT_MS = 2_000  # ZeroMQ's own: finds connections whose host is gone
GOODBYE_MS = 200  # for the last messages to leave at a stop


class SwitchServer:
    """A switch in this process: open from ``with`` or :meth:`start` until :meth:`close`.

    One thread owns the socket and the table. ``control_endpoint`` and ``data_address`` are the real ones, once started.
    Raises :class:`NetsumIOError` when an address is taken or not this machine's, :class:`UsageError` for wrong settings.
    """

    def __init__(self, settings: SwitchSettings) -> None:
        self.settings = settings
        self.stopped = threading.Event()  # the thread has ended, asked to or not
        self.failure: BaseException | None = None  # what it died of
        self._counters: Counter[str] = Counter()
        self._started_us = _now_us()
        self.datapath = _open_datapath(settings)
        try:
            self._context = zmq.Context(io_threads=1)
            self._router = _open_router(self._context, settings.control)
        except BaseException:
            self.datapath.close()
            raise
        features = self.datapath.features
        self.control_endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.data_address = f"{features.data_host}:{features.data_port}"
        self._wake_read, self._wake_write = socket.socketpair()
        self._table = JobTable(settings.jobs, features, self.datapath.awaited_ranks)
        self._thread = threading.Thread(target=self._run, name="netsum-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tells the members, frees both ports. Idempotent; takes at most about a second."""
        if self._context.closed:
            return
        if self._thread.is_alive():
            self._wake_write.send(b"\0")
            self._thread.join()
        self._router.close(linger=GOODBYE_MS)
        self._context.term()
        self.datapath.close()
        self._wake_read.close()
        self._wake_write.close()

    def __enter__(self) -> SwitchServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.failure = error
            log.exception("the control server failed")
        finally:
            self.stopped.set()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        while True:
            deadline_us = self._table.next_deadline_us
            wait_us = MAX_WAIT_US if deadline_us is None else min(MAX_WAIT_US, max(0, deadline_us - _now_us()))
            ready = dict(poller.poll(-(-wait_us // 1000)))
            if self._wake_read.fileno() in ready:
                self._carry_out(self._table.shut_down(f"the switch at {self.control_endpoint} is being stopped"))
                return
            if self._router in ready:
                self._receive()
            self._carry_out(self._table.tick(_now_us()))

    def _receive(self) -> None:
        for _ in range(BATCH_MESSAGES):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            peer_text = str(frames[-1].get("Peer-Address") or "?")
            try:
                if len(frames) != 2:
                    raise msgspec.DecodeError(f"{len(frames) - 1} frames, 1 is expected")
                message = control.decode_from_agent(frames[1].bytes)
            except msgspec.DecodeError as error:
                log.debug("malformed message from %s: %s", peer_text, error)
                self._carry_out(self._table.malformed(identity, str(error)))
                continue
            self._carry_out(self._table.handle(identity, message, peer_text, _now_us()))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        """In order; what an action leads to comes after the rest of its list."""
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Reply(identity, message):
                    todo.extend(self._send(identity, message))
                case OpenJob() as job:
                    todo.extend(self._table.opened(job.job_number, self._open_job(job), _now_us()))
                case SetResults(job_number=job_number, multicast=multicast):
                    self.datapath.set_results(job_number, multicast)
                case CloseJob(job_number=job_number):
                    self.datapath.close_job(job_number)
                case SendStatus(identity):
                    todo.extend(self._send(identity, control.StatusReply(self._status())))
                case Event(text):
                    log.info("%s", text)

    def _open_job(self, job: OpenJob) -> str | None:
        """What went wrong."""
        try:
            self.datapath.open_job(job)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            log.error("job number %d: %s", job.job_number, error)
            return str(error) or type(error).__name__
        return None

    def _send(self, identity: bytes, message: control.SwitchMessage) -> list[Action]:
        try:
            self._router.send_multipart([identity, control.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            self._counters["replies_dropped"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._counters["replies_unreachable"] += 1
            return self._table.unreachable(identity, _now_us())
        return []

    def _status(self) -> dict[str, object]:
        now_us = _now_us()
        source = StatusSource(
            software_version=self.settings.jobs.software_version,
            uptime_us=now_us - self._started_us,
            control_endpoint=self.control_endpoint,
            datapath=self.datapath,
            table=self._table.status(now_us),
            control_counters=dict(self._counters),
        )
        return collect_status(source)


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _open_datapath(settings: SwitchSettings) -> Datapath:
    host, port = parse_address(settings.data)
    if host == "0.0.0.0":
        raise UsageError("the data address must name one interface's address, not 0.0.0.0: results are sent from it")
    interface = interface_of(host)
    fitting = max_chunk_elems(interface.mtu_bytes)
    if not fitting:
        needed = data_bytes(64) + IP_UDP_HEADER_BYTES
        raise NetsumIOError(
            f"interface {interface.name} has an MTU of {interface.mtu_bytes}, at least {needed} is needed"
        )
    max_elems = min(fitting, settings.jobs.max_chunk_elems)
    make = datapath_factory(settings.datapath)
    try:
        return make(
            DatapathSettings(
                host=host,
                port=port,
                mtu_bytes=interface.mtu_bytes,
                max_chunk_elems=max_elems,
                receive_buffer_bytes=settings.receive_buffer_bytes,
                multicast=settings.multicast,
            )
        )
    except OSError as error:
        raise NetsumIOError(_cannot_bind("data address", f"{host}:{port}", "udp", port, error)) from error


def _open_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    host, port = parse_control_endpoint(endpoint)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells us of agents that are gone
    router.setsockopt(zmq.MAXMSGSIZE, control.MAX_CONTROL_MESSAGE_BYTES)
    router.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES_PER_AGENT)
    router.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES_PER_AGENT)
    router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    router.setsockopt(zmq.HEARTBEAT_IVL, CONNECTION_HEARTBEAT_MS)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * CONNECTION_HEARTBEAT_MS)
    try:
        router.bind(f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        router.close()
        with contextlib.suppress(zmq.ZMQError):
            context.term()
        raise NetsumIOError(_cannot_bind("control endpoint", f"tcp://{host}:{port}", "tcp", port, error)) from error
    return router


def _cannot_bind(what: str, address: str, protocol: str, port: int, error: OSError | zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder("tcp" if protocol == "tcp" else "udp", port)
        return f"{what} {address} is in use{holder}; choose another port, or 0 for a free one"
    return f"{what} {address} cannot be opened: {error.strerror or error}"
