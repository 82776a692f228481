"""Paths of a settings file are below the file's folder, wherever a command runs; all others below the working one."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed.common.config.notify import Notify, Webhook
from protofed.common.config.settings import ClientSettings, Monitoring, ServerSettings, read_settings
from protofed.common.errors import ConfigError, DataError
from protofed.common.pki.certificate import Party
from protofed.common.pki.identity import LiveIdentity
from protofed.deploy.daemons.client import check_root

SERVER = """
recipes = ["runs/a.toml", "digits-fednh", "./b"]
identity = "identity"
state = "state"
ledger = "sqlite:///ledger.db"
blobs = "blobs"
tensorboard = "tb"
mlflow = "sqlite:///mlflow.db"
metrics = { listen = "127.0.0.1:0", identity = "https", token = "token" }

[notify]
webhooks = [{ name = "ops", url_file = "url", hmac_secret = "hmac", ca = "ca.pem" }]
smtp = { host = "mail", sender = "a@b.org", to = ["c@d.org"], username = "a", password = "password", ca = "ca.pem" }
"""
CLIENT = """
site = "ann"
policy = "policy.toml"
identity = "identity"
state = "../state"

[metrics]
listen = "127.0.0.1:0"
token = "token"

[data]
source = "folder"
root = "images"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of both settings files, which is not the working folder."""
    (made := tmp_path / "etc").mkdir()
    (made / "server.toml").write_text(SERVER)
    (made / "site.toml").write_text(CLIENT)
    (working := tmp_path / "working").mkdir()
    monkeypatch.chdir(working)
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    return made


def test_every_path_of_a_servers_file_is_below_the_files_folder(folder: Path) -> None:
    read = read_settings(ServerSettings, folder / "server.toml", {})
    assert read.recipes == [str(folder / "runs/a.toml"), "digits-fednh", str(folder / "b")]
    assert (read.identity, read.state, read.blobs) == (folder / "identity", folder / "state", folder / "blobs")
    assert (read.ledger, read.mlflow) == (f"sqlite:///{folder}/ledger.db", f"sqlite:///{folder}/mlflow.db")
    assert (read.tensorboard, read.metrics) == (
        folder / "tb",
        Monitoring(listen="127.0.0.1:0", identity=folder / "https", token=folder / "token"),
    )
    assert isinstance(read.notify, Notify)
    webhook = Webhook(name="ops", url_file=folder / "url", hmac_secret=folder / "hmac", ca=folder / "ca.pem")
    assert read.notify.webhooks == (webhook,)
    assert read.notify.smtp is not None
    assert (read.notify.smtp.password, read.notify.smtp.ca) == (folder / "password", folder / "ca.pem")


def test_every_path_of_a_sites_file_is_below_the_files_folder(folder: Path) -> None:
    read = read_settings(ClientSettings, Path("../etc/site.toml"), {})
    at = Path.cwd() / "../etc"
    assert (read.policy, read.identity, read.state) == (str(at / "policy.toml"), at / "identity", at / "../state")
    assert (read.metrics, read.data.place) == (Monitoring(listen="127.0.0.1:0", token=at / "token"), at / "images")


def test_a_state_folder_by_default_is_below_the_files_folder_too(folder: Path) -> None:
    (folder / "server.toml").write_text("keep_rounds = 1\n")
    assert read_settings(ServerSettings, folder / "server.toml", {}).state == folder / "protofed-server"
    assert read_settings(ServerSettings, None, {}).state == Path("protofed-server")


def test_options_and_variables_are_below_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_CLIENT_IDENTITY", "own")
    read = read_settings(ClientSettings, folder / "site.toml", {"state": Path("here"), "policy": "mine.toml"})
    assert (read.identity, read.state, read.policy) == (Path("own"), Path("here"), "mine.toml")


def test_a_root_is_below_the_folder_that_protofed_data_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_DATA", "/data")
    assert read_settings(ClientSettings, folder / "site.toml", {}).data.place == Path("/data/images")


def test_absolute_paths_stay_and_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("PROTOFED_SERVER_BLOBS", "~/blobs")
    (folder / "server.toml").write_text('state = "~/state"\nidentity = "/etc/identity"\nledger = "sqlite:////x.db"\n')
    read = read_settings(ServerSettings, folder / "server.toml", {"tensorboard": Path("~/tb")})
    assert (read.state, read.blobs, read.tensorboard) == tuple(
        Path("/home/ann") / name for name in ("state", "blobs", "tb")
    )
    assert (read.identity, read.ledger) == (Path("/etc/identity"), "sqlite:////x.db")


def test_a_tilde_of_nobody_is_refused_with_its_key(folder: Path) -> None:
    (folder / "server.toml").write_text('state = "~nobody-of-that-name/state"\n')
    with pytest.raises(ConfigError, match=r"server.toml: state = '~nobody-of-that-name/state': no user"):
        read_settings(ServerSettings, folder / "server.toml", {})


def test_a_word_that_a_file_beside_the_settings_has_for_its_name_is_refused(folder: Path) -> None:
    (folder / "site.toml").write_text(CLIENT.replace("policy.toml", "standard"))
    assert read_settings(ClientSettings, folder / "site.toml", {}).policy == "standard"
    (folder / "standard").write_text("methods = []\n")
    with pytest.raises(ConfigError, match=rf"policy = 'standard': .*{folder} has a file.*'\./standard'"):
        read_settings(ClientSettings, folder / "site.toml", {})


def test_a_missing_path_is_named_with_the_files_folder(folder: Path) -> None:
    read = read_settings(ClientSettings, folder / "site.toml", {})
    assert read.identity is not None
    with pytest.raises(ConfigError, match=str(folder / "identity")):
        LiveIdentity(read.identity, Party.SITE)
    with pytest.raises(DataError, match=str(folder / "images")):
        check_root(read)
