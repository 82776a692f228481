"""A name or an option that nobody registered is an error that names the nearest one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Protocol

import pytest
from pydantic import Field

from protofed.client.method import Declaration
from protofed.client.methods.fedavg import FedAvgClient
from protofed.common.errors import ConfigError
from protofed.common.registry import Method, Registry


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


def test_names_are_listed_in_order(animals: Registry[Animal]) -> None:
    assert list(animals) == ["dog", "fish", "hound", "wolf"]


def test_a_class_is_found_under_each_of_its_names(animals: Registry[Animal]) -> None:
    assert animals.get("dog") is animals.get("hound") is animals.get("wolf") is Dog
    assert animals.get("fish") is Fish


def test_options_become_fields_and_the_rest_keeps_its_default(animals: Registry[Animal]) -> None:
    assert animals.build("dog", {}) == Dog()
    assert animals.build("dog", {"legs": 3, "tail": "short"}) == Dog(legs=3, tail="short")
    assert animals.build("fish", {}) == Fish()


def test_what_was_built_cannot_be_changed(animals: Registry[Animal]) -> None:
    dog: Any = animals.build("dog", {})
    with pytest.raises(FrozenInstanceError):
        dog.legs = 2


@pytest.mark.parametrize(("typo", "meant"), [("dgo", "dog"), ("hounds", "hound"), ("Fish", "fish")])
def test_an_unknown_name_is_told_the_nearest(animals: Registry[Animal], typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{typo}'.*'{meant}'"):
        animals.build(typo, {})


def test_a_name_like_none_is_told_all(animals: Registry[Animal]) -> None:
    with pytest.raises(ConfigError, match="unknown animal 'xyz'"):
        animals.get("xyz")
    with pytest.raises(ConfigError, match="unknown animal ''"):
        animals.options("")


def test_an_unknown_option_is_told_the_nearest(animals: Registry[Animal]) -> None:
    with pytest.raises(ConfigError, match=r"'leg'.*'legs'"):
        animals.build("dog", {"leg": 3})


def test_an_option_of_what_has_none_is_an_error(animals: Registry[Animal]) -> None:
    with pytest.raises(ConfigError, match=r"unknown option .*'legs'"):
        animals.build("fish", {"legs": 0})


def test_an_option_of_the_other_half_is_accepted_and_left_out(animals: Registry[Animal]) -> None:
    assert animals.build("wolf", {"pack": 7, "howl": "loud", "legs": 3}) == Dog(legs=3)
    assert animals.foreign("wolf") == {"pack", "howl"}
    assert animals.options("wolf") == {"legs", "tail", "weight"}


def test_a_foreign_option_is_foreign_to_that_name_only(animals: Registry[Animal]) -> None:
    with pytest.raises(ConfigError, match=r"unknown option .*'pack'"):
        animals.build("dog", {"pack": 7})


def test_a_typo_of_a_foreign_option_is_told_the_nearest(animals: Registry[Animal]) -> None:
    with pytest.raises(ConfigError, match="'howl'"):
        animals.build("wolf", {"howll": 1})


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("legs", 5, "legs = 5: .*less than or equal to 4"),
        ("legs", 0, "legs = 0: .*greater than or equal to 1"),
        ("legs", 2.5, "legs = 2.5: "),
        ("legs", "many", "legs = 'many': "),
        ("legs", None, "legs = None: "),
        ("weight", 0.0, "weight = 0.0: .*greater than 0"),
        ("weight", float("nan"), "weight = nan: "),
        ("tail", "curly", "tail = 'curly': .*'short' or 'long'"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_was_expected(
    animals: Registry[Animal], option: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^animal dog: {said}"):
        animals.build("dog", {option: value})


def test_a_name_is_registered_once(animals: Registry[Animal]) -> None:
    with pytest.raises(ConfigError, match="'dog' is registered twice"):
        animals.register("dog")(Fish)
    with pytest.raises(ConfigError, match="'wolf' is registered twice"):
        animals.register("cat", wolf=())(Fish)
    assert animals.get("dog") is Dog


def test_a_half_of_several_methods_says_title_source_and_the_other_halfs_options_of_each(
    halves: Registry[Animal],
) -> None:
    assert halves.get("dog") is halves.get("hound") is Dog
    assert (halves.foreign("dog"), halves.foreign("hound")) == ({"bark"}, set())
    assert [halves.about(name).cited for name in halves] == ["Dog (Ann, 2001)", "Hound"]
    with pytest.raises(ConfigError, match="'hound' is registered twice"):
        halves.register(Method("hound", "Another"))(Fish)
    assert halves.about("hound").title == "Hound"


def test_of_what_is_not_known_the_name_stands_for_the_title(
    animals: Registry[Animal], halves: Registry[Animal]
) -> None:
    for registry, name in ((halves, "cat"), (halves, "os:system"), (animals, "wolf")):
        assert registry.about(name) == Method(name, name)


def test_registries_do_not_know_of_one_another(animals: Registry[Animal]) -> None:
    with pytest.raises(ConfigError):
        Registry[Animal]("plant").get("dog")
    assert list(Registry[Animal]("plant")) == []


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
def test_a_half_with_a_misspelt_or_a_missing_declaration_is_refused_at_its_registration(
    wrong: type[Any], said: str
) -> None:
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
