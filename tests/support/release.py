"""`make release VERSION=0.3.0`: a release, all at once or not at all; with DRY=1 it stays in a temporary clone.

Everything is made in a clone of what is committed. Only when all of it is there do the branch, the tag and dist/ come
into this repository.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

from packaging.version import Version
from tests.checkout import NAME, ROOT
from tests.support import changelog, sbom
from tests.support.version_names import read_version, write_version

BRANCH = "main"
MAX_ITEMS = 60  # of a section of the CHANGELOG: people read them before an upgrade
CHANGES = "CHANGELOG.md"


class RefusedError(Exception):
    """Nothing was changed, and why."""


def release(root: Path, text: str, today: date, *, dry: bool) -> Path:
    """Make a release; returns the folder of its files.

    Args:
        root: the repository.
        text: the version, as "0.3.0".
        dry: leave the repository alone; the clone is kept, with its commits and its tag.

    Raises:
        RefusedError: the repository is not ready for it.
    """
    version = check(root, text)
    work = Path(tempfile.mkdtemp(prefix=f"{NAME}-release-"))
    clone = work / NAME
    try:
        _make(root, clone, version, today)
        if dry:
            return clone / "dist"
        git(root, "pull", "--quiet", "--ff-only", str(clone), BRANCH)
        git(root, "fetch", "--quiet", str(clone), "tag", f"v{version}")
        return shutil.copytree(clone / "dist", root / "dist", dirs_exist_ok=True)
    finally:
        if not dry:
            shutil.rmtree(work)


def _make(root: Path, clone: Path, version: Version, today: date) -> None:
    git(clone.parent, "clone", "--quiet", "--branch", BRANCH, str(root), clone.name)
    for key in ("user.name", "user.email"):  # a clone does not have the repository's own
        if value := git(root, "config", "--default", "", "--get", key):
            git(clone, "config", key, value)
    _commit_release(clone, version, today)
    _build(clone, version)
    _commit_development(clone, next_development(version))


def check(root: Path, text: str) -> Version:
    """The version, if the repository can be released under it.

    Raises:
        RefusedError: it cannot.
    """
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", text):
        raise RefusedError(f"VERSION={text} is no release's version: give three numbers, as VERSION=0.3.0")
    if changed := git(root, "status", "--porcelain"):
        raise RefusedError(f"the tree has changes that are not committed; commit or remove them:\n{changed}")
    if (root / "dist").is_dir() and any((root / "dist").iterdir()):
        raise RefusedError("dist/ has files, which may be of an earlier release; move them away")
    if (branch := git(root, "branch", "--show-current")) != BRANCH:
        raise RefusedError(f"this is {branch or 'no branch'}; a release is made of {BRANCH}: `git switch {BRANCH}`")
    version = Version(text)
    tags = (Version(tag[1:]) for tag in git(root, "tag", "--list", "v[0-9]*").split())
    if version <= (newest := max((read_version(root), *tags))):
        raise RefusedError(f"{version} is not newer than {newest}, of pyproject.toml or a tag; give a newer VERSION")
    _check_changes((root / CHANGES).read_text(encoding="utf-8"), text)
    return version


def _check_changes(text: str, version: str) -> None:
    section = changelog.read_section(text, version)
    if section is None or not (items := changelog.count_items(section)):
        missing = f"'## {version}'" if section is None else f"items in '## {version}'"
        raise RefusedError(f"{CHANGES} has no {missing}; write there what changes for whoever runs {NAME}")
    if items > MAX_ITEMS:
        raise RefusedError(f"{CHANGES} has {items} items for {version}, more than {MAX_ITEMS}; condense them")


def next_development(version: Version) -> Version:
    """The version of what comes after a release: 0.4.0.dev0 after 0.3.0."""
    return Version(f"{version.major}.{version.minor + 1}.0.dev0")


def _commit_release(clone: Path, version: Version, today: date) -> None:
    """Commit and tag it, with its notes as the tag's message."""
    write_version(version, clone)
    changes = clone / CHANGES
    text = changelog.write_date(changes.read_text(encoding="utf-8"), str(version), today)
    changes.write_text(text, encoding="utf-8")
    git(clone, "commit", "--quiet", "--all", "--message", f"Release {version}")
    notes = clone / "dist" / f"{NAME}-{version}-notes.md"
    notes.parent.mkdir()
    notes.write_text(f"# {NAME} {version}\n\n{changelog.read_section(text, str(version))}\n", encoding="utf-8")
    git(clone, "tag", "--annotate", "--cleanup=verbatim", "--file", str(notes), f"v{version}")


def _build(clone: Path, version: Version) -> None:
    """The files of dist/ beside the notes; without a network, as the build's own needs are among those of `dev`."""
    dist = clone / "dist"
    subprocess.run((sys.executable, "-m", "hatchling", "build", "-d", str(dist)), cwd=clone, check=True)
    sbom.write_lists(dist / f"{NAME}-{version}-server.cdx.json", dist / f"{NAME}-{version}-full.cdx.json", clone)
    shutil.copy(clone / "constraints.txt", dist)  # with which a hospital installs the wheel
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(dist.iterdir())]
    (dist / "SHA256SUMS").write_text("".join(sums), encoding="ascii")


def _commit_development(clone: Path, version: Version) -> None:
    write_version(version, clone)
    changes = clone / CHANGES
    text = changelog.add_section(changes.read_text(encoding="utf-8"), version.base_version)
    changes.write_text(text, encoding="utf-8")
    why = "Two builds never have one version."
    git(clone, "commit", "--quiet", "--all", "--message", f"After the release: {version}", "--message", why)


def git(folder: Path, *words: str) -> str:
    """What git says; its own message goes to standard error."""
    done = subprocess.run(("git", *words), cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.rstrip()


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.release", description=__doc__)
    parser.add_argument("version", help="as 0.3.0")
    parser.add_argument("--dry", action="store_true", help="in a temporary clone, which is kept")
    options = parser.parse_args(words)
    try:
        dist = release(root, options.version, datetime.now(UTC).date(), dry=options.dry)
    except RefusedError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"`{shlex.join(map(str, error.cmd))}` failed, as it says above; nothing is released\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in sorted(dist.iterdir())))
    if not options.dry:
        sys.stdout.write(f"next: git push --follow-tags origin {BRANCH}; make images at v{options.version}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
