"""The switch path of one rank: joins, probes the data path, and runs operations on the native agent."""

from __future__ import annotations

import logging
import socket
import threading
from importlib.metadata import version

from netsum.host_agent.coordinator import Coordinator
from netsum.host_agent.rendezvous import Identity
from netsum.host_agent.settings import Settings
from netsum.host_agent.switch_client import GiveUp, SwitchClient, join_message
from netsum.host_agent.tensors import HostTensor
from netsum.host_agent.work import Work
from netsum.native import NativeAgent
from netsum.protocol import wire
from netsum.protocol.control import Started, Welcome
from netsum.protocol.dtypes import OP_BY_NAME
from netsum.protocol.errors import SwitchUnreachableError

log = logging.getLogger("netsum.host_agent")

_PROBE_TIMEOUT_US = 1_000_000
_NETWORK_TIMEOUT_US = 5_000_000
_COMPLETION_WAIT_US = 500_000


class SwitchPath:
    """Usable from :meth:`open` to :meth:`close`; operations from :meth:`start` on. Work finishes in this path's own thread."""

    def __init__(
        self, identity: Identity, run_id: str, client: SwitchClient, settings: Settings, timeout_s: float
    ) -> None:
        self._identity, self._run_id, self._settings = identity, run_id, settings
        self._client = client
        self._timeout_s = timeout_s
        self._works: dict[int, tuple[Work, HostTensor]] = {}
        self._works_lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._coordinator: Coordinator | None = None
        self._native = NativeAgent(_local_host(client.host, client.port))
        self.welcome: Welcome | None = None
        self.started: Started | None = None

    def open(self, connect_timeout_s: float, deadline_s: float, give_up: GiveUp) -> None:
        """Joins with all ranks and proves the data path. Raises :class:`SwitchUnreachableError`; :meth:`close` is then still due."""
        me, native = self._identity, self._native
        join = join_message(
            job=me.job,
            run_id=self._run_id,
            rank=me.rank,
            world_size=me.world_size,
            data_address=native.address,
            max_chunk_elems=self._settings.chunk_elems or self._largest_chunk_elems(),
            slots_wanted=self._settings.slots,
            software_version=version("netsum"),
        )
        welcome = self.welcome = self._client.join(join, connect_timeout_s, deadline_s, give_up)
        faults = self._settings.faults
        if faults is not None:
            native.set_faults(
                seed=faults.seed + me.rank,
                loss=faults.loss,
                duplicate=faults.duplicate,
                reorder=faults.reorder,
                delay_min_us=faults.delay_min_us,
                delay_max_us=faults.delay_max_us,
                corrupt=faults.corrupt,
            )
        group = (welcome.multicast_host, welcome.multicast_port) if welcome.multicast_host else None
        data_ok, multicast_ok = native.probe(
            switch_host=welcome.data_host,
            switch_port=welcome.data_port,
            multicast=group,
            job_number=welcome.job_number,
            chunk_elems=welcome.chunk_elems,
            timeout_us=_PROBE_TIMEOUT_US,
        )
        text = (
            ""
            if data_ok
            else (
                f"rank {me.rank}: no answer by UDP from the switch's data port {welcome.data_host}:{welcome.data_port} "
                f"to {native.address[0]}:{native.address[1]} with {wire.data_bytes(welcome.chunk_elems)}-byte datagrams"
            )
        )
        self.started = self._client.ready(data_ok, multicast_ok, text, deadline_s, give_up)

    def start(self, coordinator: Coordinator) -> None:
        """All ranks have voted for the switch: from now on operations run."""
        welcome, started, me = self.welcome, self.started, self._identity
        assert welcome is not None
        assert started is not None
        self._coordinator = coordinator
        self._native.start(
            switch_host=welcome.data_host,
            switch_port=welcome.data_port,
            multicast=started.results == "multicast",
            rank=me.rank,
            world_size=me.world_size,
            job_number=welcome.job_number,
            epoch=welcome.epoch,
            slot_base=welcome.slot_base,
            slots=welcome.slots,
            chunk_elems=welcome.chunk_elems,
            short_exponents=welcome.short_exponents,
            network_timeout_us=min(_NETWORK_TIMEOUT_US, round(self._timeout_s * 1e6)),
            straggler_timeout_us=round(self._timeout_s * 1e6),
        )
        self._thread = threading.Thread(target=self._complete, name=f"netsum-completions-{me.rank}", daemon=True)
        self._thread.start()
        self._client.start_heartbeats(
            welcome.heartbeat_interval_us,
            welcome.lease_us,
            lambda: (coordinator.started("switch"), coordinator.completed("switch")),
            coordinator.fail_and_tell,
            f"netsum-heartbeats-{me.rank}",
        )
        coordinator.on_failure(self._native.abort)

    def submit(self, work: Work, tensor: HostTensor) -> None:
        """Hands the operation to the native agent, in the order of the operations' indices."""
        dtype = tensor.switch_dtype
        assert dtype is not None
        with self._works_lock:  # held until the work is entered: its completion may come at once
            operation = self._native.submit(
                tensor.pointer, tensor.flat.size, int(dtype), int(OP_BY_NAME[work.description.op])
            )
            assert operation == work.description.operation
            self._works[operation] = work, tensor

    def counters(self) -> dict[str, int]:
        return dict(self._native.counters())

    def awaited_ranks(self) -> tuple[int, ...]:
        return tuple(self._native.awaited_ranks())

    def close(self, timeout_s: float) -> None:
        """Fails what is unfinished, leaves the switch, ends the threads."""
        if self._closed:
            return
        self._closed = True
        self._native.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self._client.close()

    def _complete(self) -> None:
        assert self._coordinator is not None
        while True:
            completion = self._native.next_completion(_COMPLETION_WAIT_US)
            if completion is None:
                if self._closed:
                    break
                continue
            operation, error_name, missing_ranks, detail = completion
            with self._works_lock:
                work, tensor = self._works.pop(operation)
            if error_name == "none":
                self._coordinator.finish(work)
            else:
                self._coordinator.finish_failed(work, error_name, detail, missing_ranks)
            del work, tensor, completion  # or the tensor would live until the next operation

    def _largest_chunk_elems(self) -> int:
        mtu_bytes = self._native.path_mtu(self._client.host, self._client.port)
        chunk_elems = wire.max_chunk_elems(mtu_bytes)
        if not chunk_elems:
            raise SwitchUnreachableError(
                f"the path to {self._client.host} has an MTU of {mtu_bytes} bytes: no packet fits"
            )
        return chunk_elems


def _local_host(switch_host: str, switch_port: int) -> str:
    """The IPv4 address of this machine from which it reaches the switch."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((switch_host, switch_port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SwitchUnreachableError(f"no route to the switch at {switch_host}: {error.strerror or error}") from None
