"""A file, above it the environment, above both the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed.common.config.recipe import Dirichlet
from protofed.common.config.settings import ClientSettings, Monitoring, ServerSettings, read_settings
from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import Role

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


def test_no_file_is_needed() -> None:
    settings = read_settings(ServerSettings, None, {"recipes": [Path("a.toml")]})
    assert settings.listen == "127.0.0.1:7443"


def test_the_environment_goes_over_the_file(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_SERVER_LISTEN", "127.0.0.1:2")
    settings = read_settings(ServerSettings, server, {})
    assert (settings.listen, settings.keep_rounds) == ("127.0.0.1:2", 5)


def test_arguments_go_over_the_environment_and_the_file(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_SERVER_LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("PROTOFED_SERVER_KEEP_ROUNDS", "7")
    settings = read_settings(ServerSettings, server, {"listen": "127.0.0.1:3", "recipes": [Path("c.toml")]})
    assert (settings.listen, settings.keep_rounds, settings.recipes) == ("127.0.0.1:3", 7, ["c.toml"])


def test_an_argument_that_was_not_given_overrides_nothing(server: Path) -> None:
    settings = read_settings(ServerSettings, server, {"listen": None, "recipes": []})
    assert (settings.listen, len(settings.recipes)) == ("127.0.0.1:1", 2)


def test_a_wrong_option_is_not_said_to_stand_in_the_file(client: Path) -> None:
    with pytest.raises(ConfigError) as found:
        read_settings(ClientSettings, client, {"roles": ["train"]})
    assert str(found.value).startswith(f"settings ({client} and options): roles.0 = 'train': ")
    client.write_text('roles = ["train"]\n' + CLIENT)
    with pytest.raises(ConfigError) as found:
        read_settings(ClientSettings, client, {"device": "cpu"})
    assert str(found.value).startswith(f"{client}: roles.0 = 'train': ")


def test_a_zero_is_an_argument(client: Path) -> None:
    client.write_text("partition_index = 4\n" + CLIENT)
    assert read_settings(ClientSettings, client, {"partition_index": None}).partition_index == 4
    assert read_settings(ClientSettings, client, {"partition_index": 0}).partition_index == 0


def test_one_key_of_a_table_can_be_overridden(client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_CLIENT_DATA__SEED", "9")
    data = read_settings(ClientSettings, client, {}).data
    assert (data.seed, data.source) == (9, "digits")


def test_the_environment_of_one_daemon_is_not_the_others(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_CLIENT_LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("LISTEN", "127.0.0.1:2")
    assert read_settings(ServerSettings, server, {}).listen == "127.0.0.1:1"


def test_reading_twice_mixes_nothing(server: Path, tmp_path: Path) -> None:
    read_settings(ServerSettings, server, {})
    (tmp_path / "other.toml").write_text('recipes = ["z.toml"]')
    assert read_settings(ServerSettings, tmp_path / "other.toml", {}).listen == "127.0.0.1:7443"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lisen = 'x'\n", "unknown key 'lisen': did you mean 'listen'?"),
        ("keep_rounds = -1\n", "keep_rounds = -1: "),
        ("keep_rounds = 'all'\n", "keep_rounds = 'all': "),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "s.toml").write_text(f"recipes = ['a.toml']\n{line}")
    with pytest.raises(ConfigError) as error:
        read_settings(ServerSettings, tmp_path / "s.toml", {})
    assert str(error.value).startswith(f"{tmp_path / 's.toml'}: {said}")


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="'site' is missing"):
        read_settings(ClientSettings, None, {"policy": "p.toml", "state": "s", "data": {"source": "digits"}})


def test_a_server_needs_no_setting_at_all() -> None:
    assert read_settings(ServerSettings, None, {}).recipes == []


@pytest.mark.parametrize("site", ["", "Ann", "../../x", "ann smith", "a" * 65, "ann\n", "ann\0", "аnn"])
def test_a_bad_site_id_is_refused(client: Path, site: str) -> None:
    with pytest.raises(ConfigError, match="site = "):
        read_settings(ClientSettings, client, {"site": site or " "})


@pytest.mark.parametrize(
    ("key", "value"),
    [("roles", ["trainer", "spy"]), ("partition_index", -1), ("threads", 0), ("data", {"source": "x"})],
)
def test_a_wrong_argument_is_named(client: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read_settings(ClientSettings, client, {key: value})


def test_a_daemon_is_no_held_out_site(client: Path) -> None:
    client.write_text(CLIENT.replace("seed = 3", "held_out_sites = 1"))
    with pytest.raises(ConfigError, match=r"held_out_sites is for simulations; remove it"):
        read_settings(ClientSettings, client, {})


def test_roles_cannot_be_none(client: Path) -> None:
    client.write_text("roles = []\n" + CLIENT)
    with pytest.raises(ConfigError, match="roles"):
        read_settings(ClientSettings, client, {})


def test_a_list_in_the_environment_that_is_none_is_a_config_error(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOFED_SERVER_RECIPES", "a.toml")
    with pytest.raises(ConfigError, match=r"recipes"):
        read_settings(ServerSettings, server, {})


def test_no_such_file_and_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_settings(ServerSettings, tmp_path / "nowhere.toml", {})
    (tmp_path / "s.toml").write_text("= 1")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_settings(ServerSettings, tmp_path / "s.toml", {})


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
