"""Files that come with protofed for other programs: dashboards, alert rules, units, chart, Compose files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protofed.common.errors import ConfigError, StateError, unknown
from protofed.deploy import shipped


@dataclass(frozen=True)
class Kind:
    """Files that belong together.

    Attributes:
        what: in a few words.
        paths: files and folders, below `shipped.ROOT` and below the folder that they are written to.
        folders: empty ones that are made beside them.
    """

    what: str
    paths: tuple[str, ...]
    folders: tuple[str, ...] = ()


RESULTS: Final = "RESULTS.md"  # beside the recipes: a page of the documents
# All kinds keep their places to one another, so that what one names in another is found below one folder.
KINDS: Final = {
    "dashboards": Kind("Grafana's dashboards, and the provisioning that finds them", ("grafana",)),
    "prometheus": Kind(
        "Prometheus: its settings, recording rules and alerts; examples for Alertmanager",
        ("prometheus/prometheus.yml", "prometheus/rules", "prometheus/sites", "prometheus/alertmanager"),
    ),
    "systemd": Kind("systemd's units for server and sites, examples of settings, how to install them", ("systemd",)),
    "helm": Kind("a Helm chart for the server and for sites; README.md in it says how", ("helm",)),
    "compose": Kind(
        "Compose files for the server with sites, Prometheus and Grafana, and for a hospital alone",
        (
            *(
                "compose.yaml",
                "compose.site.yaml",
                ".env.example",
                "grafana",
                "prometheus/rules",
                "prometheus/alertmanager",
            ),
            *(f"docker/compose/{name}" for name in ("admission.py", "certificates.py", "replica.py", "volumes.sh")),
            "docker/compose/prometheus.yml",
            *("docker/compose/data/README.md", "docker/compose/secrets/README.md", "policies", "recipes", "sites"),
        ),
        tuple(f"docker/compose/data/{site}" for site in ("evaluator", *(f"site-{number}" for number in range(1, 6)))),
    ),
    "policies": Kind("the policies, as `protofed policies show` prints them", ("policies",)),
    "recipes": Kind("the recipes, as `protofed recipes show` prints them", ("recipes",)),
    "sites": Kind("settings of a hospital and of the demonstration's sites", ("sites",)),
}


def write_files(into: Path, kinds: Sequence[str]) -> list[Path]:
    """Write the files of these kinds, all kinds if there are none, into a folder; overwrites nothing.

    A file that is there already with the same content stays. If another one is there, nothing is written.

    Returns:
        The files that were written.

    Raises:
        ConfigError: an unknown kind, or a file is there with other content.
        StateError: a file cannot be written.
    """
    for name in kinds:
        if name not in KINDS:
            raise unknown("kind of files", name, KINDS)
    chosen = [KINDS[name] for name in kinds or KINDS]
    texts = {path: _content(path) for kind in chosen for path in _files(kind)}
    try:
        missing = _missing(into, texts)
        for path in missing:
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            with (into / path).open("xb") as file:
                file.write(texts[path])
        for folder in (folder for kind in chosen for folder in kind.folders):
            (into / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"cannot write into {into}: {error.strerror}; name a folder of yours") from error
    return [into / path for path in missing]


def _missing(into: Path, texts: Mapping[str, bytes]) -> list[str]:
    """The paths that are not in the folder yet.

    Raises:
        ConfigError: a file is there with other content.
    """
    there = {path for path in texts if os.path.lexists(into / path)}
    if other := sorted(path for path in there if not _is(into / path, texts[path])):
        raise ConfigError(f"{into / other[0]} is there with other content, and nothing is overwritten; move it away")
    return [path for path in texts if path not in there]


def without_build(text: str) -> str:
    """A Compose file, or its example of settings, without all that builds images: that takes a clone's sources."""
    text = re.sub(r"^x-build-arguments:.*\n(?:  .*\n)+\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^( +)build:\n(?:\1 +.*\n)+", "", text, flags=re.MULTILINE)
    return re.sub(r"^# What they are built from(?s:.*)\Z", "", text, flags=re.MULTILINE)


def _files(kind: Kind) -> Iterator[str]:
    for name in kind.paths:
        if not (source := shipped.ROOT / name).is_dir():
            yield name
        for folder, _, files in os.walk(source, followlinks=True):  # a link of the checkout: the chart's rules
            relative = Path(folder).relative_to(shipped.ROOT)
            yield from (str(relative / file) for file in sorted(files) if file != RESULTS)


def _content(path: str) -> bytes:
    content = (shipped.ROOT / path).read_bytes()
    if path in ("compose.yaml", "compose.site.yaml", ".env.example"):
        return without_build(content.decode()).encode()
    return content


def _is(file: Path, content: bytes) -> bool:
    return file.is_file() and file.read_bytes() == content
