"""The agent's side of the switch's control channel (netsum.protocol.control): join, ready, heartbeats, leave."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from netsum.host_agent.rendezvous import parse_host_port
from netsum.protocol import control
from netsum.protocol.errors import SwitchUnreachableError

log = logging.getLogger("netsum.host_agent")

_RESEND_S = 0.5
_POLL_MS = 50
_LEAVE_S = 0.3
_LOG_S = 2.0

GiveUp = Callable[[], str | None]  # a reason to stop trying, asked again and again


class SwitchClient:
    """One DEALER socket to one switch. Used by the caller's thread until :meth:`start_heartbeats`, then by the heartbeat thread."""

    def __init__(self, address: str, secret: str | None) -> None:
        """``address``: "tcp://host:port". Raises :class:`~netsum.protocol.errors.UsageError`."""
        self.host, self.port = parse_host_port(address, "switch")
        self.address = f"tcp://{self.host}:{self.port}"
        self._secret = secret
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.MAXMSGSIZE, control.MAX_CONTROL_MESSAGE_BYTES)
        self._socket.connect(self.address)
        self._member = ""
        self._thread: threading.Thread | None = None
        self._stop_read, self._stop_write = socket.socketpair()

    # -- join (the caller's thread) --------------------------------------------------------------------------------

    def join(self, join: control.Join, connect_timeout_s: float, deadline_s: float, give_up: GiveUp) -> control.Welcome:
        """Returns when all ranks have joined. Raises :class:`SwitchUnreachableError`.

        ``connect_timeout_s``: until the first answer; ``deadline_s`` (monotonic): until the welcome.
        """
        silent_until_s = min(time.monotonic() + connect_timeout_s, deadline_s)
        answered, next_send_s, next_log_s, missing = False, 0.0, 0.0, ""
        while True:
            now_s = time.monotonic()
            reason = give_up()
            if reason is not None:
                raise SwitchUnreachableError(reason)
            if not answered and now_s >= silent_until_s:
                raise SwitchUnreachableError(f"{self._what_is_there()} (waited {connect_timeout_s:g} s)")
            if now_s >= deadline_s:
                raise SwitchUnreachableError(f"the switch at {self.address} did not complete the job in time{missing}")
            if now_s >= next_send_s:
                next_send_s = now_s + _RESEND_S
                self._send(join)
            message = self._receive(_POLL_MS)
            answered = answered or message is not None
            match message:
                case control.Welcome():
                    self._member = message.member
                    return message
                case control.Challenge():
                    if self._secret is None:
                        raise SwitchUnreachableError(
                            f"the switch at {self.address} wants a secret: pass secret= or set NETSUM_SECRET"
                        )
                    join = msgspec.structs.replace(join, proof=control.join_proof(self._secret, message.nonce, join))
                    next_send_s = 0.0
                case control.Waiting():
                    notes = "".join(f"; {note}" for note in message.notes)
                    missing = f": it waits for ranks {message.missing_ranks}{notes}"
                    if now_s >= next_log_s:
                        next_log_s = now_s + _LOG_S
                        log.info("rank %d: the switch waits for ranks %s%s", join.rank, message.missing_ranks, notes)
                case _:
                    self._raise_if_final(message)

    def ready(
        self, data_ok: bool, multicast_ok: bool, text: str, deadline_s: float, give_up: GiveUp
    ) -> control.Started:
        """Reports the probe of the data path; returns when the switch has heard all ranks. Raises :class:`SwitchUnreachableError`."""
        next_send_s = 0.0
        while (now_s := time.monotonic()) < deadline_s:
            reason = give_up()
            if reason is not None:
                raise SwitchUnreachableError(reason)
            if now_s >= next_send_s:
                next_send_s = now_s + _RESEND_S
                self._send(control.Ready(self._member, data_ok, multicast_ok, text))
            message = self._receive(_POLL_MS)
            if isinstance(message, control.Started):
                return message
            self._raise_if_final(message)
        raise SwitchUnreachableError(f"the switch at {self.address} did not start the job in time")

    def _raise_if_final(self, message: control.SwitchMessage | None) -> None:
        if isinstance(message, control.Refused):
            raise SwitchUnreachableError(f"the switch at {self.address} refuses ({message.code}): {message.text}")
        if isinstance(message, control.JobFailed):
            raise SwitchUnreachableError(f"the switch at {self.address} cannot run the job: {message.text}")

    def _send(self, message: control.Message) -> None:
        with contextlib.suppress(zmq.Again):  # a full queue: nobody there; the deadline decides
            self._socket.send(control.encode(message), zmq.NOBLOCK)

    def _receive(self, timeout_ms: int) -> control.SwitchMessage | None:
        if not self._socket.poll(timeout_ms):
            return None
        frames = self._socket.recv_multipart()
        try:
            return control.decode_from_switch(frames[-1])
        except msgspec.DecodeError:
            log.debug("malformed message from the switch at %s", self.address)
            return None

    def _what_is_there(self) -> str:
        try:
            socket.create_connection((self.host, self.port), timeout=0.5).close()
        except OSError as error:
            return f"nothing listens at {self.address} ({error.strerror or error})"
        return f"what listens at {self.address} does not answer as a netsum switch"

    # -- heartbeats (a thread of their own) ------------------------------------------------------------------------

    def start_heartbeats(
        self,
        interval_us: int,
        lease_us: int,
        progress: Callable[[], tuple[int, int]],
        on_failure: Callable[[str], None],
        name: str,
    ) -> None:
        """``progress()``: operations started and completed. ``on_failure(text)``: the switch has ended the job."""
        self._thread = threading.Thread(
            target=self._beat, args=(interval_us / 1e6, lease_us / 1e6, progress, on_failure), name=name, daemon=True
        )
        self._thread.start()

    def _beat(
        self,
        interval_s: float,
        lease_s: float,
        progress: Callable[[], tuple[int, int]],
        on_failure: Callable[[str], None],
    ) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_read.fileno(), zmq.POLLIN)
        next_send_s, heard_s = time.monotonic(), time.monotonic()
        silent: list[int] = []
        while True:
            now_s = time.monotonic()
            if now_s >= next_send_s:
                next_send_s = now_s + interval_s
                self._send(control.Heartbeat(self._member, *progress()))
            ready = dict(poller.poll(max(1, int((next_send_s - now_s) * 1000))))
            if self._stop_read.fileno() in ready:
                break
            if self._socket in ready:
                message = self._receive(0)
                heard_s = time.monotonic()
                match message:
                    case control.HeartbeatReply():
                        if message.silent_ranks and message.silent_ranks != silent:
                            log.warning("the switch has heard nothing from ranks %s lately", message.silent_ranks)
                        silent = message.silent_ranks
                    case control.JobFailed() | control.Refused():
                        on_failure(f"the switch at {self.address} ended the job: {message.text}")
                        break
                    case _:
                        pass
            elif time.monotonic() - heard_s > lease_s:
                log.warning("the switch at %s has not answered for %.0f s", self.address, lease_s)
                heard_s = time.monotonic()
        self._leave()

    def _leave(self) -> None:
        """At most 0.3 s; a switch that misses it frees the member when its lease ends."""
        if self._member:
            self._send(control.Leave(self._member))
            deadline_s = time.monotonic() + _LEAVE_S
            while (remaining_s := deadline_s - time.monotonic()) > 0:
                if isinstance(self._receive(max(1, int(remaining_s * 1000))), control.Left):
                    break
        self._socket.close(0)

    def close(self) -> None:
        """Leaves and closes; bounded, idempotent."""
        if self._context.closed:
            return
        if self._thread is None:
            self._leave()
        else:
            self._stop_write.send(b"\0")
            self._thread.join(2 * _LEAVE_S)
        self._stop_read.close()
        self._stop_write.close()
        self._context.destroy(linger=0)


def join_message(
    *,
    job: str,
    run_id: str,
    rank: int,
    world_size: int,
    data_address: tuple[str, int],
    max_chunk_elems: int,
    slots_wanted: int,
    software_version: str,
) -> control.Join:
    return control.Join(
        protocol_version=control.PROTOCOL_VERSION,
        software_version=software_version,
        job=job,
        run_id=run_id,
        rank=rank,
        world_size=world_size,
        data_host=data_address[0],
        data_port=data_address[1],
        max_chunk_elems=max_chunk_elems,
        slots_wanted=slots_wanted,
        host_name=socket.gethostname(),
        pid=os.getpid(),
    )
