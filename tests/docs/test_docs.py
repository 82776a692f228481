"""The documents against the code and against each other: what they link to, cite, name and generate is there."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs import markdown, method_tables, tables
from pydantic import BaseModel
from tests.e2e import pilot_guide, pilot_images

from protofed.client.agent.metrics import METRICS as CLIENT_METRICS
from protofed.client.method import client_methods
from protofed.client.policy.rules import Limits, PolicyRules
from protofed.common.config.data import Data
from protofed.common.config.evaluation import Evaluation
from protofed.common.config.recipe import Federation, Plan, Recipe, parse
from protofed.common.config.settings import (
    ClientSettings,
    Monitoring,
    Notify,
    ServerSettings,
    Smtp,
    Webhook,
    read_settings,
)
from protofed.common.config.tables import Input
from protofed.common.payload import NOT_ON_THE_WIRE, Part
from protofed.common.protocol.messages import Role
from protofed.deploy import shipped
from protofed.deploy.cli import main
from protofed.deploy.doctor.checks import DIAGNOSES
from protofed.deploy.operator import snapshot
from protofed.server.method import server_methods
from protofed.server.metrics import METRICS as SERVER_METRICS
from protofed.server.notifications import wording

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs/how-to/alerts.md"
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
CITED = {name: ROOT / f"docs/explanation/{name.lower()}.md" for name in ("METHODS", "PROTOCOL", "PERFORMANCE")}
CITATION = re.compile(rf"\b({'|'.join(CITED)}) §?(\d+(?:\.\d+)?)")
# What a command may be called in: a block's line, with or without its folder, or prose between backticks.
IN_BLOCK = re.compile(r"^(?:\$ |[A-Z_]+=\S+ )?(?:\S*/|.*--no-python |.* -- \S*/)?protofed (?!0)(.+)$", re.MULTILINE)
IN_PROSE = re.compile(r"(?<!`)`(?:\S*/)?protofed ([^`]+)`")


def _tracked(*patterns: str) -> list[Path]:
    there = ("git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns)
    names = subprocess.run(there, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


PAGES = _tracked("*.md")
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TOP = {"extends", "unset"}.union(
    *(model.model_fields for model in (Recipe, ServerSettings, ClientSettings, PolicyRules))
)
COMMANDS = {path[1:]: command for path, command in tables.commands()}
GROUPS = {path for path, command in COMMANDS.items() if getattr(command, "commands", None)}


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _prose(page: Path) -> str:
    return FENCE.sub("", _text(page))


def _anchors(page: Path) -> set[str]:
    """As a forge makes them of headings."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def test_the_readme_is_short() -> None:
    assert len(_text(ROOT / "README.md").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(_prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), f"{target}#{anchor}"


def test_every_citation_in_the_sources_is_a_section() -> None:
    sections = {
        name: set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ", _text(page), re.MULTILINE)) for name, page in CITED.items()
    }
    cited = {
        (found[1], found[2])
        for path in _tracked("server/*.py", "client/*.py", "common/*.py", "deploy/*.py", "tests/*.py")
        for found in CITATION.finditer(_text(path))
        if path != Path(__file__)
    }
    items = re.findall(r"^(\d+)\. ", _text(CITED["METHODS"]).partition("## 9.")[2], re.MULTILINE)
    sections["METHODS"] |= {f"9.{number}" for number in items}
    assert cited
    assert {(name, number) for name, number in cited if number not in sections[name]} == set()


@pytest.mark.parametrize("name", sorted(client_methods))
def test_every_method_has_a_section_that_a_half_cites_a_recipe_and_a_test(name: str) -> None:
    modules = [module for half in (client_methods, server_methods) if (module := inspect.getmodule(half.get(name)))]
    cited = {number for module in modules for _, number in CITATION.findall(module.__doc__ or "")}
    sections = re.findall(r"^#+ (\d+(?:\.\d+)?)\.? (.*?)(?=^#|\Z)", _text(CITED["METHODS"]), re.MULTILINE | re.DOTALL)
    told = "".join(text for number, text in sections if number in cited)
    assert re.search(rf"\b({name}|{re.escape(server_methods.about(name).title)})\b", told, re.IGNORECASE), cited
    names = {name.replace("-", "_"), *(str(module.__name__).rpartition(".")[2] for module in modules)}
    assert any((ROOT / "tests/methods" / f"test_{one}.py").is_file() for one in names)
    assert shipped.recipe(f"digits-{name}").method.name == name


def test_no_file_leads_out_of_the_repository() -> None:
    outside = "/work" + "/"
    leads = [path for path in _tracked() if path.suffix in (".md", ".py", ".toml", ".yml") and outside in _text(path)]
    assert leads == []


# What is generated


STEPS = re.compile(r"^\| [^\n]* by step \|.*?^\n<!-- generated: halves-([\w-]+) -->$", re.MULTILINE | re.DOTALL)


def test_what_the_steps_of_an_algorithm_name_is_in_the_halves() -> None:
    told = {found[1]: found[0] for found in STEPS.finditer(_text(CITED["METHODS"]))}
    assert len(told) > 1
    for name, rows in told.items():
        halves = "".join(method_tables.source(registry.get(name)) for registry in (client_methods, server_methods))
        for row in rows.splitlines()[2:-2]:
            words = re.findall(r"`([^`]+)`", row.rpartition(" | ")[2])
            assert words, row
            assert [word for word in words if word not in halves] == [], row


def test_everything_that_is_made_is_shown() -> None:
    shown = [name for page in PAGES for name in markdown.GENERATED.findall(_text(page))]
    assert sorted(shown) == sorted(tables.GENERATED)


def test_what_is_generated_is_as_the_code_has_it() -> None:
    assert [str(page.relative_to(ROOT)) for page in tables.find_stale()] == [], "`make docs` writes them anew"


def test_a_mark_alone_and_a_part_of_an_older_text_are_filled_and_text_between_parts_stays() -> None:
    made = f"<!-- generated: sources -->\n\n{tables.sources()}\n\n<!-- end -->"
    old = "<!-- generated: sources -->\n\nold\n<!-- end -->"
    page = f"# Title\n\n<!-- generated: sources -->\n\ntext\n\n{old}\n\nlast\n"
    assert tables.fill(page) == f"# Title\n\n{made}\n\ntext\n\n{made}\n\nlast\n"
    assert tables.fill(tables.fill(page)) == tables.fill(page)


def test_every_metric_is_in_the_tables_and_nothing_else() -> None:
    for name, metrics in (("server-metrics", SERVER_METRICS), ("client-metrics", CLIENT_METRICS)):
        rows = re.findall(r"^\| `(\w+)", tables.GENERATED[name](), re.MULTILINE)
        assert rows == [metric.name for metric in metrics]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_metric_that_is_shown_exists(page: Path) -> None:
    names = [metric.name for metric in (*SERVER_METRICS, *CLIENT_METRICS)]
    shown = re.findall(r"\bprotofed_(?!server-)[a-z_]+\b", _text(page))
    assert [one for one in shown if not any(name.startswith(one) for name in names)] == []


def test_every_finding_of_the_doctor_is_in_the_table() -> None:
    rows = re.findall(r"^\| (\d+) \| `([\w-]+)`", tables.GENERATED["doctor"](), re.MULTILINE)
    assert rows == [(str(one.code), one.name) for one in DIAGNOSES.values()]


def test_every_alert_has_its_section_with_its_weight_and_no_other_is_there() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text(encoding="utf-8"))
    alerts = {rule["alert"]: rule["labels"]["severity"] for group in rules["groups"] for rule in group["rules"]}
    sections = re.findall(r"^## (\w+)\n\n\*\*(\w+)\. It means\*\*:", _text(RUNBOOK), re.MULTILINE)
    assert {name: weight.lower() for name, weight in sections} == alerts
    assert [name for name, _ in sections] == re.findall(r"^## (.+)$", _text(RUNBOOK), re.MULTILINE), "no other section"


def test_every_alerts_section_says_what_it_means_what_to_look_at_and_what_to_do() -> None:
    for section in _text(RUNBOOK).split("\n## ")[1:]:
        asked = re.findall(r"^\*\*(?:\w+\. )?(It means|Look at|Do)\*\*", section, re.MULTILINE)
        assert asked == ["It means", "Look at", "Do"], section


def test_every_alert_leads_to_its_section_and_so_does_every_message() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text(encoding="utf-8"))
    place = RUNBOOK.relative_to(ROOT).as_posix()
    led = {rule["alert"]: rule["annotations"]["runbook_url"] for group in rules["groups"] for rule in group["rules"]}
    assert led == {name: f"{place}#{name.lower()}" for name in led}
    assert f"{place}#" == wording.RUNBOOK


@pytest.mark.parametrize("part", [part for part in Part if part not in NOT_ON_THE_WIRE])
def test_every_part_that_can_leave_a_site_is_explained(part: Part) -> None:
    (row,) = re.findall(rf"^\| `{part}` \| (.+) \| (.+) \|$", tables.GENERATED["parts"](), re.MULTILINE)
    senders = {name for name in client_methods if part in client_methods.build(name, {}).sends}
    assert (row[0], set(re.findall(r"`([\w-]+)`", row[1]))) == (part.discloses, senders)


@pytest.mark.parametrize("name", sorted(client_methods))
def test_every_option_of_a_method_is_listed(name: str) -> None:
    section = f"{tables.options()}\n\n### ".partition(f"### {name}\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert sorted(rows) == sorted(client_methods.options(name) | server_methods.options(name))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *((model, "recipe") for model in (Recipe, Plan, Federation, Evaluation, Data)),
        *(
            (PolicyRules, "policy"),
            (Limits, "limits"),
            (ServerSettings, "server-settings"),
            (ClientSettings, "client-settings"),
            (Notify, "notify-settings"),
            (Smtp, "smtp-settings"),
            (Webhook, "webhook-settings"),
        ),
    ],
)
def test_every_key_is_listed(model: Any, name: str) -> None:
    assert set(model.model_fields) <= set(re.findall(r"^\| `(\w+)`", tables.GENERATED[name](), re.MULTILINE))


def test_every_command_has_its_section() -> None:
    headings = re.findall(r"^#+ protofed ?(.*)$", tables.cli(), re.MULTILINE)
    assert headings == [" ".join(path) for path in COMMANDS]


def test_every_key_of_the_json_of_watch_is_listed() -> None:
    section = _text(ROOT / "docs/reference/metrics.md").partition("\n## `runs watch --json`\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \| (.*) \|$", section, re.MULTILINE)
    keys = {key for first, _ in rows for key in re.findall(r"`(\w+)`", first)}
    inner = {key for _, second in rows for key in re.findall(r"`(\w+)`", second)}
    parts = (snapshot.SiteSnapshot, snapshot.Attempt, snapshot.ScoreSnapshot, snapshot.Problem, snapshot.TimeRemaining)
    assert keys == {"event", *(field.name for field in fields(snapshot.RunSnapshot))}
    assert {field.name for part in parts for field in fields(part)} - inner == set()


# What is shown


def _shown(page: Path) -> Iterator[str]:
    for _, block in FENCE.findall(_text(page)):
        yield from IN_BLOCK.findall(block.replace("\\\n", " "))
    yield from IN_PROSE.findall(" ".join(_prose(page).split()))


def _fault(words: Sequence[str]) -> str:
    """What is wrong with the words after `protofed`; empty: nothing."""
    path: tuple[str, ...] = ()
    rest = [word for word in words if word != "--debug"]
    while rest and path in GROUPS and (*path, rest[0]) in COMMANDS:
        path = (*path, rest.pop(0))
    if path in GROUPS and rest and re.match(r"[a-z]", rest[0]):
        return f"protofed {' '.join(path)} has no command {rest[0]}"
    known = {option for one in COMMANDS[path].params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
    return f"protofed {' '.join(path)} has no {', '.join(unknown)}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_that_is_shown_exists(page: Path) -> None:
    faults = []
    for shown in _shown(page):
        line = re.split(r"\s#|[;&|<>]", shown)[0].replace("…", " ").replace("'", " ")
        faults.append(_fault([word.strip("[](),.:") for word in shlex.split(line)]))
    assert [fault for fault in faults if fault] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_key_that_is_shown_exists(page: Path) -> None:
    for table in (tomllib.loads(block) for language, block in FENCE.findall(_text(page)) if language == "toml"):
        unknown = [key for key in table if key not in TOP]
        tables_of: dict[str, type[BaseModel]] = {
            "data": Data,
            "input": Input,
            "plan": Plan,
            "federation": Federation,
            "metrics": Monitoring,
            "notify": Notify,
        }
        for name, model in tables_of.items():
            unknown += [key for key in table.get(name, {}) if key not in model.model_fields]
        assert unknown == []


def test_the_guides_files_can_be_read() -> None:
    blocks = [part for part in pilot_guide.read() if isinstance(part, pilot_guide.Block) and part.file]
    texts = {str(block.file): block.body for block in blocks}
    recipe = tomllib.loads(texts["pilot.toml"])
    extending = {key: value for key, value in tomllib.loads(texts["lesions.toml"]).items() if key != "extends"}
    assert parse(recipe, Recipe, "pilot.toml").classes == 3
    assert parse({**recipe, **extending}, Recipe, "lesions.toml").rounds > 3
    assert texts.keys() == {"pilot.toml", "lesions.toml"}


def test_the_guides_settings_fit_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [part for part in pilot_guide.read() if isinstance(part, pilot_guide.Block)]
    recipe = tomllib.loads(next(block.body for block in blocks if block.file == "pilot.toml"))
    typed = "".join(block.body for block in blocks if block.file is None).replace("\\\n", " ").splitlines()
    evaluator, site = (shlex.split(line)[1:] for line in typed if line.startswith("protofed client init"))
    # The bundle, which names the site and is installed, is what the coordinator sent.
    named = ["--site", pilot_guide.EXAMPLE, *site[: site.index("--bundle")], *site[site.index("--bundle") + 2 :]]
    for words in (evaluator, [*named[2:], *named[:2]]):
        with pytest.raises(SystemExit) as ended:
            main.main(words)
        assert not ended.value.code
    trains = read_settings(ClientSettings, tmp_path / "site.toml", {})
    scores = read_settings(ClientSettings, tmp_path / "evaluator" / "site.toml", {})
    assert trains.site == pilot_guide.EXAMPLE
    assert (list(trains.roles), list(scores.roles)) == ([Role.TRAINER], [Role.EVALUATOR])
    assert set(trains.data.label_map.values()) == set(recipe["class_names"]) == set(pilot_images.RUN_NAMES)
    assert trains.data.label_map.keys() == pilot_images.OWN_NAMES.keys()


def test_the_guide_counts_its_own_steps() -> None:
    """The sentence in its introduction."""
    told = r"the coordinator types (\d+) lines and writes (\d+) file, each hospital types (\d+) lines, and (\d+) mails"
    found = re.search(told, _text(pilot_guide.GUIDE))
    assert found is not None
    counted = pilot_guide.effort(_text(pilot_guide.GUIDE))
    expected = (counted.coordinator, counted.files, counted.hospital, counted.mails)
    assert tuple(map(int, found.groups())) == expected


def test_steps_are_counted_by_line_file_and_mail() -> None:
    text = """
## Step 1. Certificates

```
# at the coordinator
protofed certs init --ca ca   # a comment
protofed certs sign x --ca ca \\
  --site x
```

```toml
# file pilot.toml, at the coordinator
name = "x"
```

*By mail* from the coordinator to each hospital (here: north): `north.bundle`, `pilot.toml`.

```
# at every machine, first in each terminal
export A=1
```

```
# at the coordinator, for each hospital (here: north)
protofed certs sign north.request
```

```
# at the coordinator, in a terminal of its own: the server
protofed server start
```

```
# at each hospital (here: north)
protofed client init
```

## Step 8. The real run

```
# at the coordinator
protofed runs show
```
"""
    # Two certificates, three hospitals to sign for, one start, and one variable in each of two terminals.
    assert pilot_guide.effort(text) == pilot_guide.Effort(coordinator=8, hospital=2, files=1, mails=3)
