"""Ranks of a job as threads of the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_ranks(body: Callable[[int], Any], ranks: int | Sequence[int], timeout_s: float = 60.0) -> list[Any]:
    """Calls ``body(rank)`` in a thread for each rank. Returns results in the order of ``ranks``; an exception is a result too."""
    numbers = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
    results: list[Any] = [TimeoutError("the rank did not end")] * len(numbers)

    def run(position: int) -> None:
        try:
            results[position] = body(numbers[position])
        except BaseException as error:
            results[position] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(numbers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return results


def all_good(results: list[Any]) -> list[Any]:
    """Raises the first exception among ``results``."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
