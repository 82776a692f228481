"""A password on the command line is refused, whatever command it is; environment and files may have one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.command_line import called

from protofed.common.config.settings import ClientSettings, ServerSettings, read_settings
from protofed.deploy.cli.main import refuse_passwords

SECRET = "tr0ub4dor"  # noqa: S105
PROXY, LEDGER = f"http://ann:{SECRET}@proxy:3128", f"postgresql+psycopg://ann:{SECRET}@db/ledger"
SITE = 'site = "north"\npolicy = "p.toml"\nstate = "s"\n[data]\nsource = "digits"\n'


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("client", "start", "--proxy", PROXY), "PROTOFED_CLIENT_PROXY"),
        (("client", "start", f"--proxy={PROXY}"), "PROTOFED_CLIENT_PROXY"),
        (("client", "doctor", f"--proxy={PROXY}"), "PROTOFED_CLIENT_PROXY"),
        (("tracking", "--mlflow", f"https://ann:{SECRET}@mlflow"), "PROTOFED_TRACKING_MLFLOW"),
        (
            ("tracking", "--all", "--mlflow", f"https://mlflow/?access_token={SECRET}"),
            "PROTOFED_TRACKING_MLFLOW",
        ),
        (("server", "start", "--ledger", LEDGER), "PROTOFED_SERVER_LEDGER"),
        (("server", "start", f"--ledger=postgresql://db/ledger?user=ann&password={SECRET}"), "PROTOFED_SERVER_LEDGER"),
        (("report", LEDGER), "--settings file"),
        (("--debug", "client", "start", "--proxy", f"http://ann:{SECRET}/x@proxy:1"), "PROTOFED_CLIENT_PROXY"),
    ],
)
def test_no_command_takes_a_password(words: tuple[str, ...], instead: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capfd, *words)
    assert code == 78
    assert instead in err
    assert SECRET not in out + err


@pytest.mark.parametrize(
    "words",
    [
        ("client", "start", "--proxy", "http://proxy:3128"),
        ("client", "start", "--proxy", "http://ann@proxy:3128"),
        ("tracking", "--mlflow", "https://mlflow:5000/a@b"),
        ("tracking", "--mlflow", "sqlite:///runs.db"),
        ("runs", "abort", "x", "--reason", "ann: see b@example.org"),
    ],
)
def test_an_address_without_a_password_stays(words: tuple[str, ...]) -> None:
    refuse_passwords(words)


def test_the_places_that_are_named_instead_take_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'proxy = "{PROXY}"\n{SITE}')
    proxy = read_settings(ClientSettings, file, {}).proxy
    assert proxy is not None
    assert proxy.get_secret_value() == PROXY
    file.write_text(SITE)
    monkeypatch.setenv("PROTOFED_CLIENT_PROXY", PROXY)
    proxy = read_settings(ClientSettings, file, {}).proxy
    assert proxy is not None
    assert proxy.get_secret_value() == PROXY
    monkeypatch.setenv("PROTOFED_SERVER_LEDGER", LEDGER)
    monkeypatch.setenv("PROTOFED_SERVER_MLFLOW", f"https://ann:{SECRET}@mlflow")
    server = read_settings(ServerSettings, None, {})
    assert (server.ledger, server.mlflow) == (LEDGER, f"https://ann:{SECRET}@mlflow")


def test_a_tracker_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROTOFED_TRACKING_MLFLOW", "mlruns")  # no URI: the error shows that it was read
    assert "mlflow: expected the URI" in called(capfd, "tracking", "--state", tmp_path)[2]
