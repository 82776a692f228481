"""Plug-ins: found by entry point or path, imported only where they are allowed, and told apart from typos."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from protofed.common import plugins
from protofed.common.errors import ConfigError
from protofed.common.plugins import MethodPlugin, PluginKind, is_plugin, load
from protofed.common.registry import Method, Registry

MODULE = """
from dataclasses import dataclass
from protofed.common.plugins import MethodPlugin

@dataclass(frozen=True)
class Client:
    mu: float = 0.1

class Plain: ...

METHOD = MethodPlugin("outside:Client", "known", client_options=("mu",), server_options=("weighting",))
NO_DATACLASS = MethodPlugin("outside:Plain", "outside:Plain")
LOST = MethodPlugin("outside:Nothing", "outside_halves:Server")
CITED = MethodPlugin("outside:Client", "known", title="Prox", source="Ann, 2001")
number = 3
"""
Half = Registry[object]


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `outside` that can be imported, and nothing that is allowed."""
    monkeypatch.setattr(plugins, "_allowed", set())
    (tmp_path / "outside.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence\\nsecond line')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("outside", None)


def register(folder: Path, package: str, points: str) -> None:
    """As an installed package does it."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(points, encoding="utf-8")


@pytest.fixture
def registered(tmp_path: Path) -> None:
    register(
        tmp_path, "outside", "[protofed.methods]\nprox = outside:METHOD\n\n[protofed.models]\nnet = outside:number\n"
    )


@dataclass(frozen=True)
class Known:
    personal: ClassVar[str] = "trained"
    weighting: str = "uniform"


def half(side: str) -> Half:
    registry: Half = Registry("method", half="client" if side == "client" else "server")
    registry.register("known")(Known)
    return registry


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["prox", "outside:METHOD"])
def test_what_is_not_allowed_is_never_imported(name: str) -> None:
    plugins.allow({"proxy", "outside", "outside:*"})
    for build in (lambda: load(PluginKind.METHOD, name, ()), lambda: half("client").build(name, {})):
        with pytest.raises(ConfigError, match="not allowed here: add it to `plugins`"):
            build()
    assert "outside" not in sys.modules


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["prox", "outside:METHOD"])
def test_an_allowed_one_is_found_by_its_entry_point_or_its_path(name: str) -> None:
    plugins.allow({name})
    assert isinstance(load(PluginKind.METHOD, name, ()), MethodPlugin)


@pytest.mark.usefixtures("registered")
def test_a_list_of_one_site_counts_in_place_of_what_the_process_was_allowed() -> None:
    plugins.allow({"prox"})
    with pytest.raises(ConfigError, match="not allowed"):
        half("client").build("prox", {}, allowed=frozenset())
    assert half("client").build("prox", {}, allowed=frozenset({"prox"}))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("typo", "meant"), [("proxx", "prox"), ("knwon", "known")])
def test_an_unknown_name_is_told_the_nearest_plugins_among_them(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{typo}'.*'{meant}'"):
        half("server").get(typo)


@pytest.mark.usefixtures("registered")
def test_who_wrote_one_is_told_how_it_becomes_known() -> None:
    for name, told in (("my-method", True), ("proxx", False)):
        with pytest.raises(ConfigError) as caught:
            half("client").get(name)
        assert ("pip install -e" in str(caught.value)) is told


@pytest.mark.usefixtures("registered")
def test_kinds_are_told_apart() -> None:
    assert is_plugin(PluginKind.METHOD, "prox")
    assert is_plugin(PluginKind.MODEL, "net")
    assert not is_plugin(PluginKind.MODEL, "prox")
    assert is_plugin(PluginKind.DATASET, "module:function")


@pytest.mark.usefixtures("registered")
def test_each_half_takes_its_options_and_leaves_the_others() -> None:
    plugins.allow({"prox"})
    client, server = half("client"), half("server")
    assert client.options("prox") == {"mu"}
    assert client.foreign("prox") == {"weighting"}
    assert server.options("prox") == {"weighting"}  # of the known half that it shares
    assert server.foreign("prox") == {"mu"}
    options = {"mu": 0.5, "weighting": "examples"}
    assert client.build("prox", options).mu == 0.5  # type: ignore[attr-defined]
    assert server.build("prox", options) == Known("examples")
    with pytest.raises(ConfigError, match="expected one of: mu"):
        client.build("prox", {"mo": 0.5})


def test_title_and_source_are_read_where_the_plugin_is_allowed_and_no_half_of_it_is_imported() -> None:
    assert half("server").about("outside:CITED") == Method("outside:CITED", "outside:CITED")
    assert "outside" not in sys.modules
    plugins.allow({"outside:CITED", "outside:LOST", "broken:METHOD"})
    assert half("server").about("outside:CITED").cited == "Prox (Ann, 2001)"
    for untold in ("outside:LOST", "broken:METHOD"):
        assert half("server").about(untold).cited == untold


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:METHOD", "'nowhere' cannot be imported: ModuleNotFoundError"),
        ("broken:METHOD", "cannot be imported: RuntimeError: no licence; expected"),
        (":METHOD", "'' cannot be imported"),
        ("outside:", "has no ''"),
        ("outside:ABSENT", "has no 'ABSENT'"),
        ("outside:number", "is a int: expected a MethodPlugin"),
        ("outside:NO_DATACLASS", "outside:Plain is no dataclass"),
        ("outside:LOST", "has no 'Nothing'"),
    ],
)
def test_one_that_cannot_be_used_is_refused_in_one_line(name: str, said: str) -> None:
    plugins.allow({name})
    with pytest.raises(ConfigError, match=said) as caught:
        half("client").build(name, {})
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("registered")
def test_a_name_of_two_packages_is_refused(tmp_path: Path) -> None:
    register(tmp_path, "other", "[protofed.methods]\nprox = other:METHOD\n")
    plugins.allow({"prox"})
    with pytest.raises(ConfigError, match="registered by two packages"):
        load(PluginKind.METHOD, "prox", ())


def test_a_plugin_never_takes_a_known_name(tmp_path: Path) -> None:
    register(tmp_path, "outside", "[protofed.methods]\nknown = outside:METHOD\n")
    plugins.allow({"known"})
    assert half("client").get("known") is Known
    assert "outside" not in sys.modules
