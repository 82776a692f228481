"""`protofed server start` with `[notify]`, as a process, and `protofed server doctor --notify`: what arrives where."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.deploy.daemons.test_server import ServerProcess
from tests.server.conftest import recipe
from tests.support.command_line import called
from tests.support.receivers import MailReceiver, WebhookReceiver, secret_file

from protofed.common.pki.identity import Party
from protofed.deploy import logs
from protofed.deploy.operator.connection import Operator
from protofed.server.notifications.outbox import JOURNAL_FILE

TOKEN, PASSWORD = "t0ken-of-ops", "pass word of hub"
ABORTED = "patient 4711 was in it"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def identity(server: ServerProcess) -> Path:
    return server.authority.issue(server.folder / "receiver", Party.SERVER, "receiver")


@pytest.fixture
def hook(identity: Path) -> Iterator[WebhookReceiver]:
    with WebhookReceiver(identity) as made:
        yield made


@pytest.fixture
def mail(identity: Path) -> Iterator[MailReceiver]:
    with MailReceiver(identity, user="hub", password=PASSWORD) as made:
        yield made


@pytest.fixture
def settings(server: ServerProcess, identity: Path, hook: WebhookReceiver, mail: MailReceiver) -> Path:
    """Both channels, with a secret each."""
    token, password = secret_file(server.folder, TOKEN, "token"), secret_file(server.folder, PASSWORD, "password")
    ca, path = identity / "ca.pem", server.folder / "server.toml"
    path.write_text(
        f'identity = "{server.identity}"\n'
        f'[[notify.webhooks]]\nname = "ops"\nurl = "{hook.url}"\nbearer_token = "{token}"\nca = "{ca}"\n'
        f'[notify.smtp]\nhost = "127.0.0.1"\nport = {mail.port}\nca = "{ca}"\n'
        f'username = "hub"\npassword = "{password}"\nsender = "hub@example.org"\nto = ["ann@example.org"]\n',
        encoding="utf-8",
    )
    return path


@pytest.fixture
def protofed(capfd: pytest.CaptureFixture[str]) -> Cli:
    logs.configure()
    return partial(called, capfd)


def abort(server: ServerProcess, address: str, run: str) -> None:
    with Operator(address, server.boss) as operator:
        operator.start(recipe(run), force=True)
        operator.abort(run, ABORTED)


def test_what_happens_arrives_by_both_ways_once_and_without_secrets(
    server: ServerProcess, settings: Path, hook: WebhookReceiver, mail: MailReceiver
) -> None:
    address = server.serve(f"--settings={settings}")
    ends, letter = hook.post(), mail.mail()
    assert (ends.json["event"], ends.json["server"], ends.json["facts"]["name"]) == ("certificate-ends", "hub", "hub")
    assert ends.headers["authorization"] == f"Bearer {TOKEN}"
    assert letter.message["Message-ID"] == f"<{ends.json['id']}@example.org>"
    assert (letter.tls, letter.user, letter.to) == (True, "hub", ["ann@example.org"])
    abort(server, address, "one")
    ended, letter = hook.post(), mail.mail()
    assert (ended.json["event"], ended.json["run"], ended.json["facts"]) == ("run-ended", "one", {"outcome": "aborted"})
    assert letter.message["Message-ID"] == f"<{ended.json['id']}@example.org>"
    server.stop()
    abort(server, server.serve(f"--settings={settings}"), "two")
    assert (hook.post().json["run"], mail.mail().message["Subject"].count("two")) == ("two", 1)
    server.stop()
    assert (hook.posts.empty(), mail.mails.empty()) == (True, True)
    kept = (server.folder / "state" / JOURNAL_FILE).read_text("utf-8")
    for text in (server.log(), kept, ended.body.decode(), letter.message.as_string()):
        assert not [secret for secret in (TOKEN, PASSWORD, "s3cret-hook") if secret in text]
    assert not [text for text in (kept, ended.body.decode(), letter.message.as_string()) if "4711" in text]


def test_a_webhook_that_hangs_keeps_neither_mail_nor_the_server_back_and_gets_it_after_the_restart(
    server: ServerProcess, settings: Path, hook: WebhookReceiver, mail: MailReceiver
) -> None:
    hook.hanging.set()
    address = server.serve(f"--settings={settings}")
    assert hook.arrived.wait(60)
    mail.mail()
    abort(server, address, "one")
    assert "one" in mail.mail().message["Subject"]
    server.stop()
    assert hook.posts.empty()
    hook.hanging.clear()
    server.serve(f"--settings={settings}")
    found = [hook.post().json for _ in range(2)]
    assert [each["event"] for each in found] == ["certificate-ends", "run-ended"]
    server.stop()
    assert (hook.posts.empty(), mail.mails.empty()) == (True, True)


def test_a_secret_that_cannot_be_read_is_refused_before_anything_is_made(server: ServerProcess, settings: Path) -> None:
    (server.folder / "token").chmod(0o644)
    assert "can be read or changed by others" in server.refused(f"--settings={settings}")
    assert not (server.folder / "state").exists()


def test_a_test_message_goes_by_every_channel_and_each_says_what_came_of_it(
    settings: Path, hook: WebhookReceiver, mail: MailReceiver, protofed: Cli
) -> None:
    def tried() -> tuple[str, str]:
        rows = json.loads(protofed("server", "doctor", "--notify", "--settings", settings, "--json")[1])["checks"]
        [row] = [row for row in rows if row["check"] == "notify"]
        return row.get("finding", ""), row["seen"]

    finding, message = tried()
    assert (finding, "ops" in message, "email" in message) == ("", True, True)
    sent = hook.post().json
    assert (sent["event"], mail.mail().message["Message-ID"]) == ("test", f"<{sent['id']}@example.org>")
    assert sent["id"] in message
    hook.status = 401
    finding, message = tried()
    assert (finding, "ops answered 401" in message) == ("notify-refused", True)
    assert mail.mail().message["Subject"]
    _, out, err = protofed("server", "doctor", "--notify", "--settings", settings)
    assert "notify-refused" in out
    assert not [secret for secret in (TOKEN, PASSWORD, "s3cret-hook") if secret in out + err]


def test_a_server_that_tells_nobody_cannot_be_tried(tmp_path: Path, protofed: Cli) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'identity = "none"\nlisten = "127.0.0.1:0"\nstate = "{tmp_path / "state"}"\n', encoding="utf-8")
    code, out, _ = protofed("server", "doctor", "--notify", "--settings", path)
    assert (code, "[notify]" in out) == (95, True)
