"""``netsum demo``, short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mlxtend")

from tests.e2e.switch_process import NETSUM, run_netsum

pytestmark = [pytest.mark.torch, pytest.mark.timeout(280)]


def test_the_demo_trains_through_the_switch_with_loss() -> None:
    done = run_netsum("demo", "--workers", "2", "--epochs", "1", "--loss", "1%", "--json", timeout_s=260)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["passed"]
    switch, gloo = outcome["switch"], outcome["gloo"]
    assert switch["path"] == "switch"
    assert gloo["path"] == "gloo"
    assert switch["ranks_identical"]
    assert switch["retransmissions"] > 0
    assert switch["accuracy"] > 0.5  # ten classes: it learns
    assert outcome["steps"] == 4000 // 64
    assert outcome["ring_bytes_per_worker"] == outcome["gradient_bytes"] * outcome["steps"]  # n = 2: 2(n-1)/n is 1
    assert switch["wire_bytes_per_worker"] > outcome["gradient_bytes"] * outcome["steps"]


def test_a_terminated_demo_takes_its_processes_with_it(tmp_path: Path) -> None:
    mark = {"NETSUM_TEST_MARK": str(tmp_path)}  # inherited by everything that this demo starts
    command = [*NETSUM, "demo", "--workers", "2", "--epochs", "500"]
    with subprocess.Popen(command, env={**os.environ, **mark}, stderr=subprocess.DEVNULL) as demo:
        try:
            deadline = time.monotonic() + 60
            while len(_marked(str(tmp_path))) < 5:  # demo, switch, torchrun, two workers
                assert demo.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
            demo.terminate()
            assert demo.wait(30) == 128 + signal.SIGTERM
        finally:
            demo.kill()
    assert not _marked(str(tmp_path))


def _marked(mark: str) -> list[Path]:
    """/proc/<pid>/environ of the processes that inherited ``mark`` (readable by their owner)."""
    return [path for path in Path("/proc").glob("[0-9]*/environ") if f"NETSUM_TEST_MARK={mark}\0" in _read(path)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--workers", "1"], "--workers 1"), (["--loss", "many"], "loss=many"), (["--epochs", "0"], "--epochs 0")],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments: list[str], says: str) -> None:
    done = run_netsum("demo", *arguments, timeout_s=60)
    assert done.returncode == 2
    assert says in done.stderr
