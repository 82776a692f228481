"""How much memory may be used, and when no more is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed.server.rpc.memory_guard import MemoryGuard, memory_limit, resident_bytes

MIB = 1 << 20


def group(folder: Path, name: str, content: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content, encoding="ascii")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "cgroup"
    path.write_text("1:name=systemd:/\n4:cpu,memory:/box/inner\n0::/box/inner\n", encoding="ascii")
    return path


def test_what_the_settings_say_counts(tmp_path: Path, ours: Path) -> None:
    group(tmp_path, "memory.max", f"{100 * MIB}\n")
    assert memory_limit(64, tmp_path, ours) == 64 * MIB


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"box/inner/memory.max": "max\n"}, None),
        ({"box/inner/memory.max": "1000\n"}, 900),
        ({"box/inner/memory.max": "1000\n", "box/memory.max": "500\n"}, 450),  # one around it is smaller
        ({"memory.max": "1000\n"}, 900),  # in a container, the path is another's
        ({"memory/box/inner/memory.limit_in_bytes": "2000\n"}, 1800),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
    ids=["none", "max", "own", "outer", "container", "version-1", "version-1-max"],
)
def test_otherwise_nine_tenths_of_the_control_group(
    tmp_path: Path, ours: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, content in files.items():
        group(tmp_path, name, content)
    assert memory_limit(None, tmp_path, ours) == expected
    assert memory_limit(None, tmp_path, tmp_path / "nowhere") is None


def test_memory_is_short_above_the_limit_and_only_then() -> None:
    now = 100
    guard = MemoryGuard(100, lambda: now)
    assert not guard.short()
    now = 101
    assert guard.short()
    assert guard.short()
    now = 99
    assert not guard.short()
    assert not MemoryGuard(None, lambda: 1 << 60).short()
    readings = iter([101, 100])  # what was freed is given back before anyone is refused
    assert not MemoryGuard(100, lambda: next(readings)).short()


def test_a_change_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0
    guard = MemoryGuard(100, lambda: now)
    for now in (0, 200, 200, 0, 0):  # noqa: B007
        guard.short()
    told = capsys.readouterr().out
    assert (told.count("memory is short"), told.count("memory is free again")) == (1, 1)


def test_this_process_has_a_size() -> None:
    assert 5 * MIB < resident_bytes() < (1 << 40)
