"""A file, above it the environment, above both the command line.

Paths of a settings file are below the file's folder, wherever a command runs; all others below the working one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed.common.config.data import Dirichlet
from protofed.common.config.settings import ClientSettings, Monitoring, Notify, ServerSettings, Webhook, read_settings
from protofed.common.errors import ConfigError, DataError
from protofed.common.pki.certificate import Party
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol.messages import Role
from protofed.deploy.daemons.client import check_root

SERVER = 'recipes = ["a.toml", "b.toml"]\nlisten = "127.0.0.1:1"\nkeep_rounds = 5\n'
CLIENT = """
site = "ann"
server = "127.0.0.1:1"
policy = "policy.toml"
state = "state"
[data]
source = "digits"
seed = 3
partition = { kind = "dirichlet", sites = 5, beta = 0.3 }
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    (tmp_path / "server.toml").write_text(SERVER)
    return tmp_path / "server.toml"


@pytest.fixture
def client(tmp_path: Path) -> Path:
    (tmp_path / "client.toml").write_text(CLIENT)
    return tmp_path / "client.toml"


def test_a_file_is_enough(server: Path, client: Path) -> None:
    settings = read_settings(ServerSettings, server, {})
    assert settings.recipes == [str(server.parent / "a.toml"), str(server.parent / "b.toml")]
    assert (settings.listen, settings.keep_rounds) == ("127.0.0.1:1", 5)
    site = read_settings(ClientSettings, client, {})
    assert (site.site, site.roles, site.partition_index) == ("ann", frozenset({Role.TRAINER}), 0)
    assert site.data.partition == Dirichlet(kind="dirichlet", sites=5, beta=0.3)


def test_arguments_go_over_environment_and_that_over_the_file(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROTOFED_CLIENT_LISTEN", "LISTEN"):  # of others
        monkeypatch.setenv(name, "127.0.0.1:9")
    assert read_settings(ServerSettings, server, {}).listen == "127.0.0.1:1"
    monkeypatch.setenv("PROTOFED_SERVER_LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("PROTOFED_SERVER_KEEP_ROUNDS", "7")
    settings = read_settings(ServerSettings, server, {})
    assert (settings.listen, settings.keep_rounds, len(settings.recipes)) == ("127.0.0.1:2", 7, 2)
    settings = read_settings(ServerSettings, server, {"listen": "127.0.0.1:3", "recipes": [Path("c.toml")]})
    assert (settings.listen, settings.keep_rounds, settings.recipes) == ("127.0.0.1:3", 7, ["c.toml"])
    monkeypatch.setenv("PROTOFED_SERVER_RECIPES", "a.toml")
    with pytest.raises(ConfigError, match=r"recipes"):
        read_settings(ServerSettings, server, {})


def test_a_wrong_option_is_not_said_to_stand_in_the_file(client: Path) -> None:
    with pytest.raises(ConfigError) as found:
        read_settings(ClientSettings, client, {"roles": ["train"]})
    assert str(found.value).startswith(f"settings ({client} and options): roles.0 = 'train': ")
    client.write_text('roles = ["train"]\n' + CLIENT)
    with pytest.raises(ConfigError) as found:
        read_settings(ClientSettings, client, {"device": "cpu"})
    assert str(found.value).startswith(f"{client}: roles.0 = 'train': ")


def test_a_zero_is_an_argument_and_nothing_is_none(server: Path, client: Path) -> None:
    settings = read_settings(ServerSettings, server, {"listen": None, "recipes": []})
    assert (settings.listen, len(settings.recipes)) == ("127.0.0.1:1", 2)
    client.write_text("partition_index = 4\n" + CLIENT)
    assert read_settings(ClientSettings, client, {"partition_index": None}).partition_index == 4
    assert read_settings(ClientSettings, client, {"partition_index": 0}).partition_index == 0


def test_one_key_of_a_table_can_be_overridden(client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_CLIENT_DATA__SEED", "9")
    data = read_settings(ClientSettings, client, {}).data
    assert (data.seed, data.source) == (9, "digits")


def test_reading_twice_mixes_nothing_and_no_file_is_needed(server: Path, tmp_path: Path) -> None:
    read_settings(ServerSettings, server, {})
    (tmp_path / "other.toml").write_text('recipes = ["z.toml"]')
    assert read_settings(ServerSettings, tmp_path / "other.toml", {}).listen == "127.0.0.1:7443"
    assert read_settings(ServerSettings, tmp_path / "other.toml", {}).state == tmp_path / "protofed-server"
    settings = read_settings(ServerSettings, None, {})
    assert (settings.listen, settings.recipes, settings.state) == ("127.0.0.1:7443", [], Path("protofed-server"))


def test_a_wrong_setting_is_named_with_its_file(tmp_path: Path) -> None:
    for line, said in (
        ("lisen = 'x'", "unknown key 'lisen': did you"),
        ("keep_rounds = -1", "keep_rounds = -1: "),
    ):
        (tmp_path / "s.toml").write_text(f"recipes = ['a.toml']\n{line}\n")
        with pytest.raises(ConfigError) as error:
            read_settings(ServerSettings, tmp_path / "s.toml", {})
        assert str(error.value).startswith(f"{tmp_path / 's.toml'}: {said}")
    with pytest.raises(ConfigError, match="'site' is missing"):
        read_settings(ClientSettings, None, {"policy": "p.toml", "state": "s", "data": {"source": "digits"}})


@pytest.mark.parametrize(
    "given",
    [
        *({"site": site} for site in (" ", "Ann", "../../x", "a" * 65, "ann\n")),
        {"roles": ["trainer", "spy"]},
        {"partition_index": -1},
        {"threads": 0},
        {"data": {"source": "x"}},
    ],
)
def test_a_wrong_argument_is_named(client: Path, given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        read_settings(ClientSettings, client, given)


def test_a_daemon_is_no_held_out_site_and_has_a_role(client: Path) -> None:
    client.write_text(CLIENT.replace("seed = 3", "held_out_sites = 1"))
    with pytest.raises(ConfigError, match=r"held_out_sites is for simulations; remove it"):
        read_settings(ClientSettings, client, {})
    client.write_text("roles = []\n" + CLIENT)
    with pytest.raises(ConfigError, match="roles"):
        read_settings(ClientSettings, client, {})


def test_a_misspelt_variable_is_an_error_that_names_the_nearest(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_SERVER_LISTN", "127.0.0.1:2")
    with pytest.raises(ConfigError, match=r"PROTOFED_SERVER_LISTN.*'PROTOFED_SERVER_LISTEN'"):
        read_settings(ServerSettings, server, {})


def test_an_address_of_metrics_on_the_command_line_leaves_the_rest_of_the_table(server: Path) -> None:
    server.write_text(f'{SERVER}[metrics]\nlisten = "127.0.0.1:9000"\ntoken = "token"\n', encoding="utf-8")
    of_file = Monitoring(listen="127.0.0.1:9000", token=server.parent / "token")
    assert read_settings(ServerSettings, server, {"metrics": None}).metrics == of_file
    given = read_settings(ServerSettings, server, {"metrics": "127.0.0.1:9100"}).metrics
    assert given == Monitoring(listen="127.0.0.1:9100", token=server.parent / "token")
    assert read_settings(ServerSettings, None, {"metrics": "[::1]:0"}).metrics == Monitoring(listen="[::1]:0")
    assert read_settings(ServerSettings, None, {}).metrics is None


SERVER_FILE = """
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
CLIENT_FILE = """
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
    (made / "server.toml").write_text(SERVER_FILE)
    (made / "site.toml").write_text(CLIENT_FILE)
    (working := tmp_path / "working").mkdir()
    monkeypatch.chdir(working)
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    return made


def test_every_path_of_a_servers_file_is_below_the_files_folder(folder: Path) -> None:
    read = read_settings(ServerSettings, folder / "server.toml", {})
    assert read.recipes == [str(folder / "runs/a.toml"), "digits-fednh", str(folder / "b")]
    assert (read.identity, read.state, read.blobs) == (folder / "identity", folder / "state", folder / "blobs")
    assert (read.ledger, read.mlflow) == (f"sqlite:///{folder}/ledger.db", f"sqlite:///{folder}/mlflow.db")
    assert read.tensorboard == folder / "tb"
    assert read.metrics == Monitoring(listen="127.0.0.1:0", identity=folder / "https", token=folder / "token")
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


def test_options_and_variables_are_below_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_CLIENT_IDENTITY", "own")
    monkeypatch.setenv("PROTOFED_DATA", "/data")
    read = read_settings(ClientSettings, folder / "site.toml", {"state": Path("here"), "policy": "mine.toml"})
    assert (read.identity, read.state, read.policy) == (Path("own"), Path("here"), "mine.toml")
    assert read.data.place == Path("/data/images")


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
    (folder / "site.toml").write_text(CLIENT_FILE.replace("policy.toml", "standard"))
    assert read_settings(ClientSettings, folder / "site.toml", {}).policy == "standard"
    (folder / "standard").write_text("methods = []\n")
    with pytest.raises(ConfigError, match=rf"policy = 'standard': .*{folder} has a file.*'\./standard'"):
        read_settings(ClientSettings, folder / "site.toml", {})


def test_a_missing_path_is_named_with_the_files_folder(folder: Path) -> None:
    read = read_settings(ClientSettings, folder / "site.toml", {})
    assert isinstance(read.identity, Path)
    with pytest.raises(ConfigError, match=str(folder / "identity")):
        LiveIdentity(read.identity, Party.SITE)
    with pytest.raises(DataError, match=str(folder / "images")):
        check_root(read)
