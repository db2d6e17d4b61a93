from typing import Any

class NativeSwitch:
    """The software switch's data path: one UDP socket, one thread, the slots of all jobs.

    Methods may be called from any thread. Each raises ValueError for a bad argument, OSError for a socket that fails, and, after
    :meth:`close`, RuntimeError (the counters stay readable).
    """

    def __init__(self, host: str, port: int, receive_buffer_bytes: int = 4 << 20, multicast: bool = True) -> None: ...
    @property
    def address(self) -> tuple[str, int]:
        """Where workers send to: the port is the kernel's choice if 0 was asked."""

    @property
    def receive_buffer_granted_bytes(self) -> int: ...
    def open_job(
        self,
        *,
        job_number: int,
        epoch: int,
        slot_base: int,
        slots: int,
        chunk_elems: int,
        workers: list[tuple[str, int]],
        multicast: tuple[str, int] | None,
    ) -> None:
        """``workers``: by rank. ``multicast``: the job's group, or None. Results go by unicast until :meth:`set_results`."""

    def set_results(self, job_number: int, multicast: bool) -> None: ...
    def close_job(self, job_number: int) -> None:
        """Unknown job numbers are ignored."""

    def counters(self) -> dict[str, int]:
        """Of all datagrams: ``packets_in`` …, ``drop_<reason>``, ``socket_<name>``. Never reset."""

    def job_counters(self, job_number: int) -> dict[str, int]: ...
    def slots_in_use(self, job_number: int) -> int: ...
    def awaited_ranks(self, job_number: int) -> list[int]: ...
    def close(self) -> None:
        """Stops the thread. May be called again."""

class NativeAgent:
    """A worker's data path: its sockets, its window, one thread.

    Order of calls: :meth:`set_faults`, :meth:`probe` (both optional, but results by multicast need a probe with the group),
    :meth:`start`, then the rest from any thread, :meth:`close`. Out of order: RuntimeError.
    """

    def __init__(self, host: str, port: int = 0, receive_buffer_bytes: int = 4 << 20) -> None: ...
    @property
    def address(self) -> tuple[str, int]: ...
    def path_mtu(self, host: str, port: int) -> int:
        """Bytes of the largest IPv4 packet that goes to ``host`` whole, as far as this host knows."""

    def set_faults(
        self,
        *,
        seed: int,
        loss: float = 0,
        duplicate: float = 0,
        reorder: float = 0,
        delay_min_us: int = 0,
        delay_max_us: int = 0,
        corrupt: float = 0,
    ) -> None:
        """Injects faults in both directions; probes are spared."""

    def probe(
        self,
        *,
        switch_host: str,
        switch_port: int,
        multicast: tuple[str, int] | None,
        job_number: int,
        chunk_elems: int,
        timeout_us: int,
    ) -> tuple[bool, bool]:
        """(answered by unicast, answer received by multicast). Joins the group; returns as soon as all asked for is in."""

    def start(
        self,
        *,
        switch_host: str,
        switch_port: int,
        multicast: bool,
        rank: int,
        world_size: int,
        job_number: int,
        epoch: int,
        slot_base: int,
        slots: int,
        chunk_elems: int,
        short_exponents: bool,
        network_timeout_us: int,
        straggler_timeout_us: int,
    ) -> None: ...
    def submit(self, pointer: int, numel: int, dtype: int, op: int) -> int:
        """Index of the operation. The memory must stay alive, and untouched, until the completion is taken."""

    def next_completion(self, timeout_us: int) -> tuple[int, str, list[int], str] | None:
        """(operation, error, missing ranks, detail), in order of completion; None after ``timeout_us``, or once closed and drained.

        error: "none", "switch_silent", "peers_missing", "integrity", "overflow" or "aborted".
        """

    def abort(self, detail: str) -> None:
        """Fails all unfinished operations. When it returns no tensor is touched any more."""

    def counters(self) -> dict[str, int]:
        """``packets_out`` …, ``drop_<reason>``, ``socket_<name>``, ``fault_in_<name>``, ``fault_out_<name>``, ``rto_us``, ``srtt_us``,
        ``outstanding``."""

    def awaited_ranks(self) -> list[int]: ...
    def close(self) -> None:
        """Fails what is unfinished ("aborted"), stops the thread, wakes all waiters. May be called again."""

def __getattr__(name: str) -> Any: ...  # parts without a typed face yet
