"""The version is written once, in pyproject.toml; images, chart and documents repeat it, and one command changes it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from datetime import date
from pathlib import Path

import pytest
from packaging.version import Version

from protofed.common.deprecated import COMMANDS, KEYS
from tests.support import changelog, release
from tests.support.release import RefusedError, git
from tests.support.version_names import find_names, read_version, semantic, write_version

ROOT = Path(__file__).parents[1]
VERSION = read_version()
TODAY = date(2030, 1, 2)
CHART = "deploy/helm/protofed/Chart.yaml"
CHANGES = "# Changes\n\n## 0.3.0 (not released yet)\n\n### New\n\n* One thing.\n\n## 0.2.0 – 2026-11-23\n\n* Old.\n"

RUN = """
import sys
from pathlib import Path
from tests.support.release import main
sys.exit(main(root=Path({root!r})))
"""


# The tree


def test_every_image_and_wheel_is_named_by_this_version() -> None:
    found = list(find_names())
    assert [(path, version) for path, version in found if version != str(VERSION)] == [], "make version"
    assert {"deploy/compose.yaml", "deploy/docker/Dockerfile", "docs/how-to/install.md"} <= {path for path, _ in found}


def test_the_chart_has_this_version_as_helm_wants_it() -> None:
    chart = (ROOT / CHART).read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", chart, re.MULTILINE) == [semantic(VERSION)], "make version"
    assert re.findall(r'^appVersion: "(.+)"$', chart, re.MULTILINE) == [str(VERSION)], "make version"


def test_the_newest_changes_are_this_versions_or_the_next_ones() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\d+\.\d+\.\d+)", changes, re.MULTILINE)[0]
    assert Version(newest) >= VERSION


def test_no_old_name_is_taken_after_its_end() -> None:
    """0.4.0.dev0 is what becomes 0.4.0."""
    old = [*KEYS.items(), *COMMANDS.items()]
    assert [name for name, renamed in old if Version(renamed.ends).release <= VERSION.release] == []


def test_every_wing_shows_its_types() -> None:
    wings = ("common", "server", "client", "deploy", "protos")
    assert [wing for wing in wings if not (ROOT / wing / "protofed" / wing / "py.typed").is_file()] == []


# The command, on a small repository


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What a release reads and writes, on the branch main."""
    root = tmp_path / "repository"
    files = {
        "pyproject.toml": '[project]\nname = "protofed"\nversion = "0.2.0"\n',
        "CHANGELOG.md": CHANGES,
        "README.md": "Of 0.2.0.\n",
        CHART: 'apiVersion: v2\nversion: 0.2.0\nappVersion: "0.2.0"\n',
        "deploy/compose.yaml": "image: protofed-server:0.2.0\n",
        "docs/install.md": "protofed-0.2.0-py3-none-any.whl, unlike numpy-0.2.0-py3-none-any.whl\n",
        ".gitignore": "dist/\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    git(root, "init", "--quiet", "--initial-branch=main")
    identify(root)
    commit(root)
    return root


def identify(root: Path) -> None:
    git(root, "config", "user.name", "Release")
    git(root, "config", "user.email", "release@example.org")


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "A commit")


def write_changes(root: Path, text: str) -> None:
    (root / "CHANGELOG.md").write_text(text, encoding="utf-8")
    commit(root)


def test_a_repository_that_is_ready_is_not_refused(repository: Path) -> None:
    assert release.check(repository, "0.3.0") == Version("0.3.0")


@pytest.mark.parametrize("version", ["", "0.3", "v0.3.0", "0.3.0rc1", "0.3.0.dev0", "0.3.0+local", "00.3.0"])
def test_it_refuses_what_is_no_releases_version(repository: Path, version: str) -> None:
    with pytest.raises(RefusedError, match="three numbers"):
        release.check(repository, version)


@pytest.mark.parametrize("name", ["README.md", "new.txt"])
def test_it_refuses_a_tree_with_changes(repository: Path, name: str) -> None:
    (repository / name).write_text("changed", encoding="utf-8")
    with pytest.raises(RefusedError, match=f"not committed(?s:.*){name}"):
        release.check(repository, "0.3.0")


@pytest.mark.parametrize("switch", [("--quiet", "--create", "fix"), ("--quiet", "--detach")])
def test_it_refuses_another_branch(repository: Path, switch: tuple[str, ...]) -> None:
    git(repository, "switch", *switch)
    with pytest.raises(RefusedError, match="git switch main"):
        release.check(repository, "0.3.0")


@pytest.mark.parametrize("version", ["0.2.0", "0.1.9"])
def test_it_refuses_a_version_that_is_not_newer(repository: Path, version: str) -> None:
    with pytest.raises(RefusedError, match=r"not newer than 0\.2\.0"):
        release.check(repository, version)


def test_it_refuses_a_version_that_has_a_tag(repository: Path) -> None:
    git(repository, "tag", "v0.3.0")
    with pytest.raises(RefusedError, match=r"not newer than 0\.3\.0"):
        release.check(repository, "0.3.0")


@pytest.mark.parametrize(
    "text", [CHANGES.replace("## 0.3.0", "## 0.3.01"), CHANGES.replace("* One thing.\n", ""), "# Changes\n"]
)
def test_it_refuses_a_changelog_without_its_section(repository: Path, text: str) -> None:
    write_changes(repository, text)
    with pytest.raises(RefusedError, match=r"CHANGELOG\.md has no .*'## 0\.3\.0'"):
        release.check(repository, "0.3.0")


def test_it_refuses_more_than_60_items(repository: Path) -> None:
    write_changes(repository, CHANGES.replace("* One thing.\n", "* One thing.\n" * 61))
    with pytest.raises(RefusedError, match="61 items"):
        release.check(repository, "0.3.0")


def test_a_refusal_ends_the_command_and_changes_nothing(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = git(repository, "rev-parse", "HEAD")
    assert release.main(["0.2.0"], repository) == 2
    assert "not newer" in capsys.readouterr().err
    assert (git(repository, "rev-parse", "HEAD"), git(repository, "tag")) == (before, "")


def test_versions_of_other_things_stay(repository: Path) -> None:
    write_version(Version("0.4.0.dev0"), repository)
    assert (repository / "README.md").read_text(encoding="utf-8") == "Of 0.2.0.\n"
    install = (repository / "docs/install.md").read_text(encoding="utf-8")
    assert install == "protofed-0.4.0.dev0-py3-none-any.whl, unlike numpy-0.2.0-py3-none-any.whl\n"
    assert (repository / CHART).read_text("utf-8") == 'apiVersion: v2\nversion: 0.4.0-dev0\nappVersion: "0.4.0.dev0"\n'
    write_version(Version("0.4.0"), repository)
    assert (repository / CHART).read_text("utf-8") == 'apiVersion: v2\nversion: 0.4.0\nappVersion: "0.4.0"\n'


def test_a_release_comes_into_the_repository_with_its_tag_and_the_next_version(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "_build", lambda *_: None)
    (repository / "dist").mkdir()
    (old := repository / "dist/protofed-0.2.0.tar.gz").touch()
    with pytest.raises(release.RefusedError, match="move them away"):
        release.release(repository, "0.3.0", TODAY, dry=False)
    old.unlink()
    dist = release.release(repository, "0.3.0", TODAY, dry=False)
    assert [path.name for path in dist.iterdir()] == ["protofed-0.3.0-notes.md"]
    assert git(repository, "log", "--format=%s").splitlines() == [
        "After the release: 0.4.0.dev0",
        "Release 0.3.0",
        "A commit",
    ]
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "rev-parse", "v0.3.0^{commit}") == git(repository, "rev-parse", "HEAD^")
    changes = git(repository, "show", "v0.3.0:CHANGELOG.md") + "\n"
    assert changes == CHANGES.replace("(not released yet)", "– 2030-01-02")
    after = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    assert after == changes.replace("## 0.3.0", "## 0.4.0 (not released yet)\n\n## 0.3.0")
    assert read_version(repository) == Version("0.4.0.dev0")


def test_a_build_that_fails_leaves_the_repository_as_it_was(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(clone: Path, version: Version) -> None:
        raise subprocess.CalledProcessError(1, ["hatchling", clone])

    monkeypatch.setattr(release, "_build", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = git(repository, "rev-parse", "HEAD")
    assert release.main(["0.3.0"], repository) == 1
    assert "nothing is released" in capsys.readouterr().err
    assert (git(repository, "rev-parse", "HEAD"), git(repository, "tag")) == (before, "")
    assert git(repository, "status", "--porcelain") == ""
    assert list(tmp_path.iterdir()) == [repository]


# The command, on a clone of this repository


def test_a_dry_run_makes_all_files_without_a_network_and_leaves_the_tree_alone(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="not in this environment: `make .venv/ready`")
    repository = tmp_path / "repository"
    git(tmp_path, "clone", "--quiet", str(ROOT), "repository")
    git(repository, "switch", "--quiet", "--force-create", "main")
    identify(repository)
    write_changes(repository, CHANGES.replace("0.3.0", "9.0.0"))
    before = git(repository, "rev-parse", "HEAD")
    dist = run_dry(repository, "9.0.0", tmp_path / "temporary")
    assert (git(repository, "rev-parse", "HEAD"), git(repository, "tag", "--list", "v9*")) == (before, "")
    assert git(repository, "status", "--porcelain", "--ignored") == ""
    wheel, source = "protofed-9.0.0-py3-none-any.whl", "protofed-9.0.0.tar.gz"
    lists = [f"protofed-9.0.0-{kind}.cdx.json" for kind in ("server", "full")]
    notes = "protofed-9.0.0-notes.md"
    files = {path.name for path in dist.iterdir()}
    assert files == {wheel, source, notes, "constraints.txt", "SHA256SUMS", *lists}
    listed = [line.split("  ") for line in (dist / "SHA256SUMS").read_text(encoding="ascii").splitlines()]
    assert {name: digest for digest, name in listed} == {
        name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in files - {"SHA256SUMS"}
    }
    with zipfile.ZipFile(dist / wheel) as packed:
        assert b"\nVersion: 9.0.0\n" in packed.read("protofed-9.0.0.dist-info/METADATA")
        assert b"protofed-server:9.0.0" in packed.read("protofed/deploy/compose.yaml")
    with tarfile.open(dist / source) as archive:
        assert "protofed-9.0.0/pyproject.toml" in archive.getnames()
    components = {name: json.loads((dist / name).read_text(encoding="utf-8")) for name in lists}
    assert {one["metadata"]["component"]["version"] for one in components.values()} == {"9.0.0"}
    server, full = ({part["name"].lower() for part in components[name]["components"]} for name in lists)
    assert "grpcio" in server < full
    assert "torch" in full - server
    said = (dist / notes).read_text(encoding="utf-8")
    assert said == "# protofed 9.0.0\n\n### New\n\n* One thing.\n"
    clone = dist.parent
    assert git(clone, "cat-file", "-t", "v9.0.0") == "tag"
    assert git(clone, "tag", "--list", "--format=%(contents)", "v9.0.0") == said.rstrip()
    assert read_version(clone) == Version("9.1.0.dev0")
    assert {version for _, version in find_names(clone)} == {"9.1.0.dev0"}
    git(clone, "switch", "--quiet", "--detach", "v9.0.0")
    assert read_version(clone) == Version("9.0.0")
    assert {version for _, version in find_names(clone)} == {"9.0.0"}
    assert re.search(r"^## 9\.0\.0 – \d{4}-\d\d-\d\d$", (clone / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert changelog.read_section((clone / "CHANGELOG.md").read_text("utf-8"), "9.0.0") == "### New\n\n* One thing."


def run_dry(repository: Path, version: str, temporary: Path) -> Path:
    """The folder of the files; no process had a network, or, where nobody may take it away, a proxy or an index."""
    temporary.mkdir()
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    without = ("unshare", "--map-root-user", "--net")
    offline = (
        without if subprocess.run([*without, "true"], check=False, stderr=subprocess.DEVNULL).returncode == 0 else ()
    )
    code = RUN.format(root=str(repository))
    done = subprocess.run(
        [*offline, sys.executable, "-c", code, version, "--dry"],
        cwd=ROOT,
        env={**os.environ, **nowhere, "PIP_NO_INDEX": "1", "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1]).parent
