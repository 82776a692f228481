"""deploy/docker: what the Dockerfile promises, read without an engine."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.support.dockerfile import BEFORE, DOCKER, EVERY, ROOT, STAGES, TARGETS, Stage, image

from protofed.common.config.settings import ClientSettings, Monitoring, ServerSettings, read_settings
from protofed.deploy.cli.main import main

PRIVATE = ("INDEX_URL", "EXTRA_INDEX_URL", "CA_BUNDLE", "WHEELHOUSE", "TORCH_INDEX_URL")  # of closed networks


def environment(target: str) -> dict[str, str]:
    pairs = re.findall(r'(\w+)=("[^"]*"|\S+)', " ".join(image(target).said("ENV")))
    return {name: value.strip('"') for name, value in pairs}


def test_every_instruction_works_with_either_builder_from_the_base_image() -> None:
    known = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "LABEL", "RUN", "STOPSIGNAL"}
    assert {instruction for instruction, _ in EVERY} <= {*known, "USER", "WORKDIR"}, "ADD fetches what nobody checked"
    assert not [rest for _, rest in EVERY if re.search(r"--mount|--chmod|--link|<<\w", rest)]
    assert not (DOCKER / "Dockerfile").read_text(encoding="utf-8").startswith("# syntax")
    assert {stage.base for stage in STAGES.values()} - {"${BASE_IMAGE}"} <= set(STAGES)
    sources = [one for rest in image("server").said("COPY") + image("client").said("COPY") for one in rest.split()[:1]]
    assert {*sources} == {"--from=server-files", "--from=client-files"}, "nothing of the context is in an image as such"
    order = list(STAGES)
    assert order.index("server") < order.index("client-files"), "the old builder makes all stages before its target"


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_is_root_in_it_and_its_labels_say_what_it_is(target: str) -> None:
    assert image(target).said("USER")[-1] == "10001:10001"
    assert image(target).said("STOPSIGNAL") == ["SIGTERM"]
    for _, rest in image(target).steps:
        assert not [name for name in PRIVATE if re.search(rf"\b{name}\b", rest)]
        assert "/in/" not in rest
        assert "/tools" not in rest
    told = " ".join(image(target).said("LABEL"))
    keys = ("title", "description", "version", "revision", "licenses", "base.name")
    assert all(f"org.opencontainers.image.{key}=" in told for key in keys)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"image.licenses={project['license']} " in told
    assert f"VERSION={project['version']}" in STAGES[target].said("ARG")


@pytest.mark.parametrize("target", TARGETS)
def test_its_command_is_one_and_it_says_how_it_is(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    (check,) = image(target).said("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    state = environment(target)[f"PROTOFED_{target.upper()}_STATE"]
    assert command == ["python", "-I", "-m", "protofed.deploy.daemons.readyz", state]
    assert image(target).said("WORKDIR")[-1] == state
    assert environment(target)["PATH"].startswith("/opt/protofed/bin:"), "where that python is"
    assert image(target).said("ENTRYPOINT") == ['["protofed"]']
    command = json.loads(STAGES[target].said("CMD")[0])
    assert command[0] == target
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(("target", "model"), [("server", ServerSettings), ("client", ClientSettings)])
def test_a_settings_file_need_not_know_the_container(
    target: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(target).items():
        if name.startswith("PROTOFED_"):
            monkeypatch.setenv(name, value)
    file = tmp_path / "settings.toml"
    site = 'site = "north"\nserver = "hub.example:7443"\ndata = { source = "digits" }\n' if target == "client" else ""
    file.write_text(f'{site}state = "elsewhere"\n[metrics]\nlisten = "127.0.0.1:1"\ntoken = "/run/token"\n')
    said = read_settings(model, file, {})
    assert said.metrics == Monitoring(listen="0.0.0.0:9464", token=Path("/run/token"))
    assert said.state == Path("/var/lib/protofed")
    assert said.identity == Path("/etc/protofed/identity")


def test_what_installs_obeys_the_pins_of_one_base_image_and_explained_arguments() -> None:
    tools = " ".join(STAGES["tools"].said("ENV"))
    assert 'PIP_CONSTRAINT="/in/constraints.txt /in/tools.txt"' in tools
    pins = [line for name in ("constraints.txt", "deploy/docker/tools.txt") for line in pinned(ROOT / name)]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+]+", line) for line in pins)
    (installs,) = [rest for _, rest in EVERY if "pip install" in rest]
    assert " ".join(installs.split()) == (
        "python3 -m venv /tools && grep '^pip==' hashes.txt > pip.txt"
        " && /tools/bin/pip install --quiet -r pip.txt && /tools/bin/pip install --quiet -c hashes.txt -r tools.txt"
    )
    assert "HASHES=on" in STAGES["tools"].said("ARG")
    assert """[ "${HASHES}" != off ] || sed -i 's/ --hash=.*//' hashes.txt""" in STAGES["tools"].said("RUN")
    (default,) = [rest.partition("=")[2] for instruction, rest in BEFORE if instruction == "ARG"]
    assert re.fullmatch(r"python:3\.11-slim@sha256:[0-9a-f]{64}", default)
    assert f"\n# BASE_IMAGE={default}\n" in (ROOT / "deploy" / ".env.example").read_text(encoding="utf-8")
    arguments = {
        rest.partition("=")[0] for stage in (Stage("", BEFORE), *STAGES.values()) for rest in stage.said("ARG")
    }
    told = re.findall(r"^\| `(\w+)` \|", (DOCKER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(told) == arguments


def pinned(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
