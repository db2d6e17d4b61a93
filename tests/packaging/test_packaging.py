"""The tree and the lists that must agree with it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: dict[str, str] = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]


def test_netsum_is_a_namespace_package() -> None:
    """An __init__.py directly in a netsum/ folder would hide all other components, and no tool would say so."""
    skipped = (".venv", "build", ".git")
    stray = [p for p in ROOT.rglob("netsum/__init__.py") if not p.relative_to(ROOT).parts[0].startswith(skipped)]
    assert not stray


def test_components_are_the_same_in_all_lists() -> None:
    components = {str(Path(path).parents[1]) for path in PACKAGES.values()}
    patterns = ("*/netsum/*/__init__.py", "*/python/netsum/*/__init__.py")
    on_disk = {p.relative_to(ROOT).parents[2] for pattern in patterns for p in ROOT.glob(pattern)}
    assert {str(folder) for folder in on_disk if folder.parts[0] not in ("build", "tests")} == components
    tools = PROJECT["tool"]
    assert set(tools["mypy"]["files"]) == components
    assert set(tools["mypy"]["mypy_path"].split(":")) == components
    assert set(tools["pyright"]["include"]) == set(tools["pyright"]["extraPaths"]) == components
    names = {name.replace("/", ".") for name in PACKAGES}
    assert set(tools["importlinter"]["root_packages"]) == names
    layers = next(c["layers"] for c in tools["importlinter"]["contracts"] if c["type"] == "layers")
    assert {name for layer in layers for name in layer.split(" | ")} == names


@pytest.mark.parametrize(
    "module",
    ["protocol", "native", "switch", "switch.daemon", "host_agent", "emulator", "experiments", "cli.main"],
)
def test_the_core_imports_without_torch(module: str) -> None:
    block = "import sys; sys.modules['torch'] = None; "
    done = subprocess.run(
        [sys.executable, "-c", f"{block}import netsum.{module}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_help_is_quick_because_it_loads_no_heavy_library() -> None:
    code = (
        "import sys; from netsum.cli import main; "
        "print([m for m in ('torch', 'numpy', 'scapy', 'rich.progress') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_only_host_agent_torch_and_the_demo_import_torch() -> None:
    importing = re.compile(r"^\s*(?:import torch|from torch)", re.MULTILINE)
    files = [p for path in PACKAGES.values() for p in (ROOT / path).rglob("*.py") if importing.search(p.read_text())]
    allowed = (ROOT / "host_agent/netsum/host_agent/torch", ROOT / "experiments/netsum/experiments")
    assert [p for p in files if not p.is_relative_to(allowed[0]) and not p.is_relative_to(allowed[1])] == []


def test_typed_packages_say_so() -> None:
    missing = [path for path in PACKAGES.values() if not (ROOT / path / "py.typed").exists()]
    assert not missing


def test_constraints_hold_every_dependency_once_and_no_local_path() -> None:
    lines = [li for li in (ROOT / "constraints.txt").read_text().splitlines() if li and not li.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in lines)
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    assert len(pinned) == len(lines)
    project = PROJECT["project"]
    wanted = [*PROJECT["build-system"]["requires"], *project["dependencies"]]
    wanted += [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[<>=\[]", requirement)[0]).lower() for requirement in wanted}
    assert names <= pinned


def test_no_file_is_longer_than_600_lines() -> None:
    sources = [p for path in PACKAGES.values() for p in (ROOT / path).rglob("*.py")]
    sources += [*(ROOT / "native").rglob("*.?pp"), *(ROOT / "tests").rglob("*.py")]
    assert [(str(p.relative_to(ROOT)), n) for p in sources if (n := len(p.read_text().splitlines())) > 600] == []
