"""The examples for Alertmanager have no secret, amtool takes them, and a real one tells a mail server and a webhook."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from tests.support.dashboards import PROMETHEUS, rules
from tests.support.receivers import MailReceiver, WebhookReceiver, secret_file

EXAMPLES = sorted((PROMETHEUS / "alertmanager").glob("*.yml"))
BINARY = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")  # upstream's name, Debian's
installed = pytest.mark.skipif(
    BINARY is None or shutil.which("amtool") is None,
    reason="Alertmanager is not installed (apt: prometheus-alertmanager)",
)
SUMMARY, DESCRIPTION = "Site north has made no progress", "Its IT should look whether the daemon runs."
RUNBOOK = "docs/how-to/alerts.md#sitesilent"
each = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@installed
@each
def test_amtool_takes_every_example(path: Path) -> None:
    done = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@each
def test_secrets_are_in_files_and_labels_are_those_of_alerts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(password|secret|credentials|token)\s*:", text)
    assert not re.search(r"insecure_skip_verify|require_tls: false|http://", text)
    files = re.findall(r"_file:\s*(\S+)", text)
    assert all(file.startswith("secrets/") for file in files)
    assert bool(files) == (path.stem != "nobody")
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    severities = {rule["labels"]["severity"] for rule in rules("alerts")}
    names = {rule["alert"] for rule in rules("alerts")}
    matchers = [line for route in config["route"].get("routes", ()) for line in route["matchers"]]
    assert {re.fullmatch(r'severity="(\w+)"', line) and line.split('"')[1] for line in matchers} <= severities
    for rule in config.get("inhibit_rules", ()):
        for line in (*rule["source_matchers"], *rule["target_matchers"]):
            assert line.split('"')[1] in names
    assert {config["route"]["receiver"]} <= {one["name"] for one in config["receivers"]}


def test_the_mail_of_the_example_passes_the_runbook_on() -> None:
    assert "{{ .Annotations.runbook_url }}" in example("email")


@contextmanager
def alertmanager(folder: Path, text: str) -> Iterator[str]:
    """A real one, as an example says with other addresses; its host:port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    config = folder / "alertmanager.yml"
    config.write_text(re.sub(r"group_wait: \w+", "group_wait: 0s", text), encoding="utf-8")
    options = [f"--config.file={config}", f"--storage.path={folder}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(BINARY), *options, "--cluster.listen-address="], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text("utf-8")
            with suppress(ConnectionError), closing(http.client.HTTPConnection(address, timeout=60)) as connection:
                connection.request("GET", "/-/ready")
                if connection.getresponse().status == 200:
                    break
        yield address
    finally:
        process.kill()
        process.wait()


def fire(address: str, name: str, severity: str) -> None:
    labels = {"alertname": name, "severity": severity, "site": "north", "instance": "hub"}
    alert = {"labels": labels, "annotations": {"summary": SUMMARY, "description": DESCRIPTION, "runbook_url": RUNBOOK}}
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request("POST", "/api/v2/alerts", json.dumps([alert]), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200


def example(name: str, *changes: tuple[str, str]) -> str:
    text = (PROMETHEUS / "alertmanager" / f"{name}.yml").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


@installed
def test_a_critical_alert_goes_by_mail_to_whoever_is_on_call_and_a_warning_to_the_team(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    secret_file(tmp_path / "secrets", "pw", "smtp-password")
    with MailReceiver() as receiver:
        here = ("mail.example.org:587", f"127.0.0.1:{receiver.port}")
        login = ("  smtp_auth_username: protofed@example.org\n", "")
        text = example("email", here, login, ("smtp_require_tls: true", "smtp_require_tls: false"))
        with alertmanager(tmp_path, text) as address:
            fire(address, "SiteSilent", "warning")
            mail = receiver.mail()
            assert mail.to == ["study-team@example.org"]
            assert SUMMARY in str(mail.message["Subject"])
            body = mail.message.get_body(("plain",))
            assert body is not None
            assert DESCRIPTION in body.get_content()
            assert f"What to do: {RUNBOOK}" in body.get_content()
            fire(address, "RoundStuck", "critical")
            assert receiver.mail().to == ["on-call@example.org"]


@installed
def test_a_webhook_gets_alerts_with_the_token_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    secret_file(tmp_path / "secrets", "t0ken", "webhook-token")
    with WebhookReceiver() as receiver:
        text = example("webhook", ("https://alerts.example.org/protofed", receiver.url))
        with alertmanager(tmp_path, text) as address:
            fire(address, "SiteSilent", "warning")
            post = receiver.post()
    assert post.headers["authorization"] == "Bearer t0ken"
    assert post.json["alerts"][0]["annotations"]["summary"] == SUMMARY
    assert post.json["alerts"][0]["annotations"]["runbook_url"] == RUNBOOK
