"""Each channel against a real receiver: what arrives, by which proof, and what is said when nothing does."""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path

import pytest
import structlog
from tests.support.connect_proxy import ConnectProxy
from tests.support.pki import Authority
from tests.support.receivers import RUN_FAILED, MailReceiver, WebhookReceiver, secret_file, settings_of

from protofed.common.errors import ConfigError
from protofed.common.pki.identity import Party
from protofed.server.notifications.channels import Channel, NotSentError, open_channels
from protofed.server.notifications.notice import VERSION, Notice
from protofed.server.notifications.wording import notice

NOTICE = notice(RUN_FAILED, "hub", 1_800_000_000.0)
PASSWORD, OTHER = "correct horse battery", "another one"


def channel(folder: Path, toml: str) -> Channel:
    notify = settings_of(folder, toml).notify
    assert notify is not None
    (made,) = open_channels(notify)
    return made


def webhook(folder: Path, url: str, *lines: str) -> Channel:
    rest = "\n".join(lines)
    return channel(folder, f'[[notify.webhooks]]\nname = "ops"\nurl = "{url}"\n{rest}\n')


def email(folder: Path, port: int, *lines: str) -> Channel:
    rest = "\n".join(lines)
    to = 'sender = "hub@example.org"\nto = ["ann@example.org", "bob@example.org"]'
    return channel(folder, f'[notify.smtp]\nhost = "127.0.0.1"\nport = {port}\n{to}\n{rest}\n')


@pytest.fixture
def authority() -> Authority:
    return Authority.make()


@pytest.fixture
def identity(tmp_path: Path, authority: Authority) -> Path:
    return authority.issue(tmp_path / "receiver", Party.SERVER, "receiver")


# Webhooks


def test_a_webhook_gets_versioned_json_that_names_event_run_and_id(tmp_path: Path) -> None:
    with WebhookReceiver() as receiver:
        webhook(tmp_path, receiver.url).send(NOTICE)
        post = receiver.post()
    assert post.path == "/hooks/s3cret-hook"
    assert post.headers["content-type"] == "application/json"
    assert post.json == {"version": VERSION, **NOTICE.table()}
    assert post.json.keys() == {"version", *Notice.__dataclass_fields__}
    assert (post.json["event"], post.json["run"], post.json["site"]) == ("run-ended", "digits", None)
    assert post.json["facts"] == {"outcome": "failed"}
    assert post.headers["webhook-id"] == post.json["id"] == NOTICE.id
    assert not {"authorization", "webhook-signature"} & post.headers.keys()


@pytest.mark.parametrize("text", ["a-secret-in-words", "whsec_" + base64.b64encode(b"\x00\x01\xff" * 8).decode()])
def test_a_signature_is_of_id_time_and_body_as_standard_webhooks_has_it(tmp_path: Path, text: str) -> None:
    with WebhookReceiver() as receiver:
        webhook(tmp_path, receiver.url, f'hmac_secret = "{secret_file(tmp_path, text)}"').send(NOTICE)
        post = receiver.post()
    key = base64.b64decode(text[6:]) if text.startswith("whsec_") else text.encode()
    signed = f"{post.headers['webhook-id']}.{post.headers['webhook-timestamp']}.".encode() + post.body
    expected = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    assert post.headers["webhook-signature"] == f"v1,{expected}"


def test_a_bearer_token_and_a_url_come_from_files(tmp_path: Path) -> None:
    with WebhookReceiver() as receiver:
        url, token = secret_file(tmp_path, receiver.url, "url"), secret_file(tmp_path, "t0ken")
        proxy = '[notify]\nproxy = "http://ann:pw@127.0.0.1:9"\n'  # a receiver on this machine is reached without
        lines = f'{proxy}[[notify.webhooks]]\nname = "ops"\nurl_file = "{url}"\nbearer_token = "{token}"\n'
        channel(tmp_path, lines).send(NOTICE)
        post = receiver.post()
    assert post.headers["authorization"] == "Bearer t0ken"


def test_https_is_believed_with_the_right_ca_only(tmp_path: Path, identity: Path) -> None:
    other = Authority.make()
    (tmp_path / "other.pem").write_bytes(other.pem)
    with WebhookReceiver(identity) as receiver:
        webhook(tmp_path, receiver.url, f'ca = "{identity / "ca.pem"}"').send(NOTICE)
        receiver.post()
        for line in ("", f'ca = "{tmp_path / "other.pem"}"'):
            with pytest.raises(NotSentError, match="not trusted"):
                webhook(tmp_path, receiver.url, line).send(NOTICE)
        assert receiver.posts.empty()


def test_a_redirect_is_not_followed_with_the_token(tmp_path: Path) -> None:
    with WebhookReceiver() as receiver, WebhookReceiver() as elsewhere:
        receiver.status, receiver.location = 307, elsewhere.url
        lines = f'bearer_token = "{secret_file(tmp_path, "t0ken")}"'
        with pytest.raises(NotSentError, match="307"):
            webhook(tmp_path, receiver.url, lines).send(NOTICE)
        assert elsewhere.posts.empty()


def test_any_answer_but_a_2xx_and_none_are_failures_that_do_not_say_the_url(tmp_path: Path) -> None:
    with WebhookReceiver() as receiver:
        made = webhook(tmp_path, receiver.url)
        for status in (401, 404, 503):
            receiver.status = status
            with pytest.raises(NotSentError, match=str(status)):
                made.send(NOTICE)
    with pytest.raises(NotSentError) as failed:  # nobody is there
        made.send(NOTICE)
    assert "s3cret-hook" not in str(failed.value)


def test_the_proxy_of_the_settings_is_asked_and_the_environments_is_not(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, identity = ConnectProxy(user="ann:p w"), authority.issue(tmp_path / "hook", Party.SERVER, "h", ["hook.test"])
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "*")
    with WebhookReceiver(identity) as receiver:
        proxy.names["hook.test"] = "127.0.0.1"
        url = f"https://hook.test:{receiver.port}/x"
        lines = f'[notify]\nproxy = "http://ann:p%20w@{proxy.address}"\n'
        hook = f'[[notify.webhooks]]\nname = "ops"\nurl = "{url}"\nca = "{identity / "ca.pem"}"\n'
        channel(tmp_path, lines + hook).send(NOTICE)
        post = receiver.post()
    assert proxy.asked == [f"hook.test:{receiver.port}"]
    assert "proxy-authorization" not in post.headers
    proxy.die()


# E-mail


@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")  # the receiver takes TLS for STARTTLS
@pytest.mark.parametrize("security", ["starttls", "tls"])
def test_a_mail_goes_by_tls_with_the_password_to_everybody(tmp_path: Path, identity: Path, security: str) -> None:
    tls = security == "tls"
    with MailReceiver(identity, tls=tls, user="hub", password=PASSWORD) as receiver:
        lines = f'security = "{security}"', f'ca = "{identity / "ca.pem"}"', 'username = "hub"'
        password = f'password = "{secret_file(tmp_path, PASSWORD)}"'
        email(tmp_path, receiver.port, *lines, password).send(NOTICE)
        mail = receiver.mail()
    assert (mail.tls, mail.user, mail.sender) == (True, "hub", "hub@example.org")
    assert mail.to == ["ann@example.org", "bob@example.org"]
    assert mail.message.get_content_type() == "text/plain"
    assert mail.message["Message-ID"] == f"<{NOTICE.id}@example.org>"
    assert NOTICE.title in str(mail.message["Subject"])
    text = mail.message.get_content()
    assert NOTICE.text in text
    assert NOTICE.todo in text
    assert "More: docs/how-to/alerts.md#runfailed" in text


def test_a_mail_server_without_starttls_or_of_another_ca_gets_nothing(tmp_path: Path, identity: Path) -> None:
    with MailReceiver() as receiver, pytest.raises(NotSentError, match="STARTTLS"):
        email(tmp_path, receiver.port).send(NOTICE)
    with MailReceiver(identity) as receiver:
        with pytest.raises(NotSentError, match="not trusted"):
            email(tmp_path, receiver.port).send(NOTICE)
        assert receiver.mails.empty()


def test_a_mail_server_that_repeats_the_password_is_quoted_without_it(tmp_path: Path, identity: Path) -> None:
    login = base64.b64encode(f"\0hub\0{PASSWORD}".encode()).decode()
    with MailReceiver(identity, user="hub", password=PASSWORD) as receiver:
        receiver.refusal = f"554 no: {login} {PASSWORD} \x07"
        lines = f'ca = "{identity / "ca.pem"}"', 'username = "hub"'
        made = email(tmp_path, receiver.port, *lines, f'password = "{secret_file(tmp_path, PASSWORD)}"')
        with pytest.raises(NotSentError) as failed:
            made.send(NOTICE)
    assert "554" in str(failed.value)
    with MailReceiver(identity, user="hub", password=OTHER) as receiver:
        made = email(tmp_path, receiver.port, *lines, f'password = "{secret_file(tmp_path, PASSWORD)}"')
        with pytest.raises(NotSentError, match="535") as wrong:
            made.send(NOTICE)
    assert PASSWORD not in str(wrong.value)
    assert login not in str(failed.value)
    assert PASSWORD not in str(failed.value)
    assert str(failed.value).isprintable()


@pytest.mark.parametrize(("host", "private"), [("127.0.0.1", True), ("mail.example.org", False)])
def test_messages_that_others_can_read_on_the_way_are_warned_of(tmp_path: Path, host: str, private: bool) -> None:
    smtp = f'[notify.smtp]\nhost = "{host}"\nsecurity = "none"\nsender = "a@b.example"\nto = ["c@d.example"]\n'
    notify = settings_of(tmp_path, f'{smtp}[[notify.webhooks]]\nname = "ops"\nurl = "http://{host}/"\n').notify
    assert notify is not None
    with structlog.testing.capture_logs() as lines:
        open_channels(notify)
    assert [line["channel"] for line in lines] == ([] if private else ["ops", "email"])


def test_a_refused_recipient_does_not_keep_the_others_from_it_and_all_of_them_do(tmp_path: Path) -> None:
    with MailReceiver() as receiver:
        receiver.refused, receiver.farewell = frozenset({"ann@example.org"}), "500 what?"  # it has taken the mail
        made = email(tmp_path, receiver.port, 'security = "none"')
        assert "1 of 2" in made.send(NOTICE)
        assert receiver.mail().to == ["bob@example.org"]
        receiver.refused |= {"bob@example.org"}
        with pytest.raises(NotSentError, match="550"):
            made.send(NOTICE)


# What is refused before anything is sent


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[notify]\n", "nobody to tell"),
        ('[notify]\nevents = ["site-back", "run-ended"]\n', "'site-silent'"),
        ('[notify]\nevents = ["run-goes-on", "site-silent"]\n', "'run-stalled'"),
        ('[[notify.webhooks]]\nname = "ops"\n', "either url or url_file"),
        ('[[notify.webhooks]]\nname = "ops"\nurl = "ftp://x/"\n', "expected a URL"),
        ('[[notify.webhooks]]\nname = "ops"\nurl = "http://u:p@x/"\n', "expected a URL"),
        ('[[notify.webhooks]]\nname = "ops"\nurl = "http://x/"\nbearer_token = "f"\n', "needs https"),
        ('[[notify.webhooks]]\nname = "email"\nurl = "https://x/"\n', "give it another"),
        (2 * '[[notify.webhooks]]\nname = "ops"\nurl = "https://x/"\n', "same name"),
        ('[notify.smtp]\nhost = "m"\nsender = "a@b"\nto = []\n', "at least 1"),
        ('[notify.smtp]\nhost = "m"\nsender = "a@b"\nto = ["c@d"]\nusername = "u"\n', "together"),
        ('[notify.smtp]\nhost = "m"\nsender = "a@b"\nto = ["c@d\\nBcc: e@f"]\n', "pattern"),
        (
            '[notify.smtp]\nhost = "m"\nsender = "a@b"\nto = ["c@d"]\nsecurity = "none"\n'
            'username = "u"\npassword = "f"\n',
            "others read it",
        ),
    ],
)
def test_settings_that_tell_nobody_or_everybody_are_refused(tmp_path: Path, toml: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        settings_of(tmp_path, toml)


def test_a_secret_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path, "t0ken")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read"):
        webhook(tmp_path, "https://x/", f'bearer_token = "{path}"')
    path.chmod(0o600)
    path.write_text("two\nlines", encoding="ascii")
    with pytest.raises(ConfigError, match="one line") as failed:
        webhook(tmp_path, "https://x/", f'bearer_token = "{path}"')
    assert "two" not in str(failed.value)
    with pytest.raises(ConfigError, match="PEM"):
        webhook(tmp_path, "https://x/", f'ca = "{path}"')
