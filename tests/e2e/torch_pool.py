"""Worker processes for tests of the DDP hook: started once, they run one case after another (importing torch takes seconds).

Run as a module it is one worker: it reads lines "case {arguments}" and answers a JSON line for each.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import traceback
from typing import IO, Any

START_TIMEOUT_S = 90.0
CASE_TIMEOUT_S = 60.0


class CaseFailedError(AssertionError):
    """A case raised on some rank; the text holds the tracebacks."""


class TorchPool:
    """``world_size`` processes with torch.distributed (gloo) initialised. :meth:`run` is bounded; :meth:`close` leaves no process."""

    def __init__(self, world_size: int, environment: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.torch_pool"],
                env={**common, **environment, "RANK": str(rank), "WORLD_SIZE": str(world_size)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        self._answers: list[queue.Queue[str]] = [queue.Queue() for _ in self.processes]
        for process, answers in zip(self.processes, self._answers, strict=True):
            threading.Thread(target=_read_lines, args=(process.stdout, answers), daemon=True).start()
        self._collect("start", START_TIMEOUT_S)

    def run(self, case: str, timeout_s: float = CASE_TIMEOUT_S, **arguments: Any) -> list[Any]:
        """What the function ``case`` of tests.e2e.torch_cases returned on each rank. Raises :class:`CaseFailedError`."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{case} {json.dumps(arguments)}\n")
            process.stdin.flush()
        return self._collect(case, timeout_s)

    def _collect(self, case: str, timeout_s: float) -> list[Any]:
        answers = []
        for rank, lines in enumerate(self._answers):
            try:
                answers.append(json.loads(lines.get(timeout=timeout_s)))
            except queue.Empty:
                self.close()
                raise CaseFailedError(f"{case}: rank {rank} gave no answer within {timeout_s} s") from None
        errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if errors:
            raise CaseFailedError(f"{case}:\n" + "\n".join(errors))
        return [answer["value"] for answer in answers]

    def close(self) -> list[int]:
        """Exit codes; processes that do not end by themselves are killed."""
        for process in self.processes:
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.close()
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(20))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait(10))
        return codes


def _read_lines(stream: IO[str] | None, lines: queue.Queue[str]) -> None:
    assert stream is not None
    for line in stream:
        lines.put(line)
    lines.put(json.dumps({"error": "the process ended"}))


def main() -> None:
    import torch
    import torch.distributed as dist

    from tests.e2e import torch_cases

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints does not get between the answers
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    print(json.dumps({"value": dist.get_rank()}), file=answers, flush=True)
    for line in sys.stdin:
        case, _, arguments = line.partition(" ")
        try:
            answer = {"value": getattr(torch_cases, case)(**json.loads(arguments))}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    torch_cases.close_states()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
