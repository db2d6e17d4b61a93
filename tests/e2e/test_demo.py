"""``netsum demo``, short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mlxtend")

from tests.e2e.switch_process import run_netsum

pytestmark = [pytest.mark.torch, pytest.mark.timeout(280)]


def test_the_demo_trains_through_the_switch_with_loss_and_leaves_no_process() -> None:
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
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if "netsum.experiments.demo.train" in _read(p)]
    assert not left


def _read(path: Path) -> str:
    try:
        return path.read_text().replace("\0", " ")
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
