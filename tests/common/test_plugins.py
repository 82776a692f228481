"""Plug-ins: found by entry point or path, imported only where they are allowed, and told apart from typos."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import pytest
from pydantic import Field

from protofed.client.method import Declaration
from protofed.client.methods.fedavg import FedAvgClient
from protofed.common import plugins
from protofed.common.errors import ConfigError
from protofed.common.plugins import ONE_CLASS, Method, MethodPlugin, PluginKind, Registry, is_plugin, load

MODULE = """
from dataclasses import dataclass
from protofed.common.plugins import ONE_CLASS, MethodPlugin

@dataclass(frozen=True)
class Client:
    mu: float = 0.1

class Plain: ...

METHOD = MethodPlugin("outside:Client", "known", client_options=("mu",), server_options=("weighting",))
NO_DATACLASS = MethodPlugin("outside:Plain", "outside:Plain")
LOST = MethodPlugin("outside:Nothing", "outside_halves:Server")
CITED = MethodPlugin("outside:Client", "known", title="Prox", source="Ann, 2001")
OF_CLASSES = MethodPlugin("outside:Client", "known", tasks=ONE_CLASS)
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
    points = "[protofed.methods]\nprox = outside:METHOD\n\n[protofed.models]\nnet = outside:number\n"
    register(tmp_path, "outside", points)


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
        with pytest.raises(ConfigError, match=r"not allowed here\. Add it to `plugins`"):
            build()
    assert "outside" not in sys.modules


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["prox", "outside:METHOD"])
def test_an_allowed_one_is_found_by_its_entry_point_or_its_path(name: str) -> None:
    plugins.allow({name})
    assert isinstance(load(PluginKind.METHOD, name, ()), MethodPlugin)
    with pytest.raises(ConfigError, match="not allowed"):  # a site's list counts in place of the process's
        half("client").build(name, {}, allowed=frozenset())
    plugins.allow(set())
    assert half("client").build(name, {}, allowed=frozenset({name}))
    kinds = (PluginKind.METHOD, "prox"), (PluginKind.MODEL, "net"), (PluginKind.DATASET, "module:function")
    assert all(is_plugin(*one) for one in kinds)
    assert not is_plugin(PluginKind.MODEL, "prox")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("typo", "meant"), [("proxx", "prox"), ("knwon", "known")])
def test_an_unknown_name_is_told_the_nearest_plugins_among_them(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{typo}'.*'{meant}'") as caught:
        half("server").get(typo)
    assert "pip install -e" not in str(caught.value)
    with pytest.raises(ConfigError, match="pip install -e"):  # for who wrote one
        half("client").get("my-method")


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
    plugins.allow({"outside:CITED", "outside:OF_CLASSES", "outside:LOST", "broken:METHOD"})
    assert half("server").about("outside:CITED").cited == "Prox (Ann, 2001)"
    assert [half("server").about(f"outside:{name}").tasks for name in ("CITED", "OF_CLASSES")] == ["any", ONE_CLASS]
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
def test_a_name_of_two_packages_is_refused_and_none_takes_a_known_one(tmp_path: Path) -> None:
    register(tmp_path, "other", "[protofed.methods]\nprox = other:METHOD\nknown = outside:METHOD\n")
    plugins.allow({"prox", "known"})
    assert half("client").get("known") is Known
    assert "outside" not in sys.modules
    with pytest.raises(ConfigError, match="registered by two packages"):
        load(PluginKind.METHOD, "prox", ())


class Animal(Protocol):
    """Anything."""


@dataclass(frozen=True)
class Dog:
    """Has options of all kinds."""

    legs: Annotated[int, Field(ge=1, le=4)] = 4
    tail: Literal["short", "long"] = "long"
    weight: Annotated[float, Field(gt=0)] = 10.0


@dataclass(frozen=True)
class Fish:
    """Has no options."""


@pytest.fixture
def animals() -> Registry[Animal]:
    registry: Registry[Animal] = Registry("animal")
    registry.register("dog", "hound", wolf=("pack", "howl"))(Dog)
    registry.register("fish")(Fish)
    return registry


@pytest.fixture
def halves() -> Registry[Animal]:
    registry: Registry[Animal] = Registry("method", half="server")
    papers = Method("dog", "Dog", "Ann, 2001", client_options=("bark",)), Method("hound", "Hound")
    registry.register(*papers)(Dog)
    return registry


def test_a_class_is_found_under_each_of_its_names(animals: Registry[Animal]) -> None:
    assert animals.get("dog") is animals.get("hound") is animals.get("wolf") is Dog
    assert animals.get("fish") is Fish
    assert list(animals) == ["dog", "fish", "hound", "wolf"]
    for name, told in (("dgo", "'dgo'.*'dog'"), ("Fish", "'Fish'.*'fish'"), ("xyz", "unknown animal 'xyz'")):
        with pytest.raises(ConfigError, match=told):
            animals.build(name, {})
    with pytest.raises(ConfigError, match="unknown animal ''"):
        animals.options("")
    assert list(Registry[Animal]("plant")) == [], "it knows of no other"


def test_options_become_fields_and_the_rest_keeps_its_default(animals: Registry[Animal]) -> None:
    assert animals.build("dog", {}) == Dog()
    assert animals.build("dog", {"legs": 3, "tail": "short"}) == Dog(legs=3, tail="short")
    assert animals.build("fish", {}) == Fish()


def test_an_option_of_the_other_half_is_accepted_and_left_out(animals: Registry[Animal]) -> None:
    assert animals.build("wolf", {"pack": 7, "howl": "loud", "legs": 3}) == Dog(legs=3)
    assert animals.foreign("wolf") == {"pack", "howl"}
    assert animals.options("wolf") == {"legs", "tail", "weight"}


@pytest.mark.parametrize(
    ("name", "option", "told"),
    [
        ("dog", "leg", r"'leg'.*'legs'"),
        ("fish", "legs", r"unknown option .*'legs'"),
        ("dog", "pack", r"unknown option .*'pack'"),  # the other half's, under another name
        ("wolf", "howll", "'howl'"),
    ],
)
def test_an_unknown_option_is_told_the_nearest(animals: Registry[Animal], name: str, option: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        animals.build(name, {option: 3})


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("legs", 5, "legs = 5: .*less than or equal to 4"),
        ("legs", "many", "legs = 'many': "),
        ("legs", None, "legs = None: "),
        ("weight", float("nan"), "weight = nan: "),
        ("tail", "curly", "tail = 'curly': .*'short' or 'long'"),
    ],
)
def test_a_value_out_of_range_is_named_with_more(animals: Registry[Animal], option: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^animal dog: {said}"):
        animals.build("dog", {option: value})


def test_a_name_is_registered_once(animals: Registry[Animal]) -> None:
    with pytest.raises(ConfigError, match="'dog' is registered twice"):
        animals.register("dog")(Fish)
    with pytest.raises(ConfigError, match="'wolf' is registered twice"):
        animals.register("cat", wolf=())(Fish)
    assert animals.get("dog") is Dog


def test_a_half_of_several_methods_says_title_and_source_of_each(
    animals: Registry[Animal], halves: Registry[Animal]
) -> None:
    assert halves.get("dog") is halves.get("hound") is Dog
    assert (halves.foreign("dog"), halves.foreign("hound")) == ({"bark"}, set())
    assert [halves.about(name).cited for name in halves] == ["Dog (Ann, 2001)", "Hound"]
    with pytest.raises(ConfigError, match="'hound' is registered twice"):
        halves.register(Method("hound", "Another"))(Fish)
    assert halves.about("hound").title == "Hound"
    for registry, name in ((halves, "cat"), (halves, "os:system"), (animals, "wolf")):
        assert registry.about(name) == Method(name, name)


@pytest.mark.parametrize("half", ["client", "server"])
def test_methods_are_there_for_whoever_asks_first(half: str) -> None:
    """In a process that has imported nothing else: `client check` once knew no method."""
    asked = f"from protofed.{half}.method import {half}_methods as known; print(*known); known.get('fednh')"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert {"fedavg", "fednh", "fedprp", "fedproc", "cwfedavg"} <= set(done.stdout.split())


class Exchanging(Protocol):
    exchanges: ClassVar[frozenset[str]]


class Optional(Protocol):
    def refine(self) -> None: ...


@dataclass(frozen=True)
class Right:
    mu: float = 0.1
    exchanges: ClassVar[frozenset[str]] = frozenset({"share"})


@dataclass(frozen=True)
class Misspelt:
    exchange: ClassVar[frozenset[str]] = frozenset({"share"})


@dataclass(frozen=True)
class Below(Misspelt):
    """It has the wrong word of its base."""


@dataclass(frozen=True)
class Silent:
    def refine(self) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Misspelt, "'exchange': did you mean 'exchanges'"),
        (Below, "'exchange': did you mean 'exchanges'"),
        (Silent, "half Silent has no exchanges; expected the members of Exchanging"),
    ],
)
def test_a_half_with_a_misspelt_or_missing_declaration_is_not_registered(wrong: type[Any], said: str) -> None:
    """A site's policy looks at what a half declares: `exchange` was taken for a method that exchanges nothing."""
    registry: Registry[Exchanging] = Registry("method", half="client", protocols=(Exchanging, Optional))
    registry.register("right")(Right)
    with pytest.raises(ConfigError, match=said):
        registry.register("wrong")(wrong)
    assert list(registry) == ["right"]


@pytest.mark.parametrize("forgotten", [field.name for field in fields(Declaration)])
def test_a_declaration_leaves_nothing_unsaid(forgotten: str) -> None:
    given = {field.name: getattr(FedAvgClient.declares, field.name) for field in fields(Declaration)}
    del given[forgotten]
    with pytest.raises(TypeError, match=forgotten):
        Declaration(**given)
