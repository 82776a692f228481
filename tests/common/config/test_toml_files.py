"""A wrong file is refused by what is wrong, with what is right at that place; suggestions do not cross tables.

`unset`: what a recipe takes out of the one that it extends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.common.config.test_recipe import BASE, extending

from protofed.client.policy.rules import PolicyRules
from protofed.common.config.data import Data
from protofed.common.config.recipe import Recipe, parse, read_recipe, read_toml
from protofed.common.config.settings import ClientSettings, ServerSettings, read_settings
from protofed.common.config.toml_files import HALLMARKS, parse_toml, read_table
from protofed.common.errors import ConfigError, nearest
from protofed.common.ids import check_id
from protofed.deploy import shipped

MODELS: dict[str, type[BaseModel]] = {
    "a recipe": Recipe,
    "a site's settings": ClientSettings,
    "a server's settings": ServerSettings,
    "a policy": PolicyRules,
}
DEPLOY = shipped.folder("recipes").parent
FILES = {
    "a recipe": DEPLOY / "recipes" / "digits-fednh.toml",
    "a site's settings": DEPLOY / "sites" / "digits-trio.toml",
    "a policy": DEPLOY / "policies" / "standard.toml",
}
SITE = {"site": "a", "policy": "standard", "state": "s", "data": {"source": "digits"}}


def refusal(table: dict[str, Any], model: type[BaseModel]) -> str:
    with pytest.raises(ConfigError) as error:
        parse(table, model, "f")
    return str(error.value).removeprefix("f: ")


def recipe(**changes: Any) -> dict[str, Any]:
    return {**read_table(FILES["a recipe"]), **changes}


def test_hallmarks_are_keys_of_one_kind_of_file_only() -> None:
    for kind, model in MODELS.items():
        assert HALLMARKS[kind] <= set(model.model_fields)
        others = {key for other in MODELS if other != kind for key in HALLMARKS[other]}
        assert not others & set(model.model_fields)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("expected", MODELS)
def test_a_file_of_another_kind_is_named(kind: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "given.toml"
    settings = 'site = "a"\npolicy = "p"\nstate = "s"\n'  # the shipped one leaves these to the command line
    text = FILES[kind].read_text(encoding="utf-8")
    file.write_text(settings + text if kind == "a site's settings" else text, encoding="utf-8")
    model = MODELS[expected]

    def read() -> object:
        if issubclass(model, ClientSettings | ServerSettings):
            return read_settings(model, file, {})
        return read_toml(file, model)

    if kind == expected:
        read()
        return
    with pytest.raises(ConfigError) as error:
        read()
    assert str(error.value).startswith(f"{file}: this is {kind}; expected {expected}")


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        (recipe(lr=0.1), "it belongs into [plan]"),
        (recipe(alpha=0.5), "it is called 'beta', of [data.partition]"),
        (recipe(label_map={}), "it belongs into [data]"),
        (recipe(plan={"quorm": 1}), "remove it"),  # no key of [plan], and the like one is another table's
        (recipe(plan={"quorm": 1}), "expected one of: amp, augmentation, batch_size"),
        (recipe(plan={"learning_rate": 1}), "it is called 'lr'"),
        (recipe(plan__learning_rate=1), "write 'plan.lr'"),
        (recipe(plan__epoch=1), "write 'plan.epochs'"),
        (recipe(plan={"Epochs": 1}), "did you mean 'epochs'?"),
        (recipe(data={"source": "digits", "partition": {"kind": "shards", "sites": 2, "shard": 2}}), "'shards'?"),
    ],
)
def test_a_suggestion_is_of_the_same_table_or_names_the_other(table: dict[str, Any], hint: str) -> None:
    said = refusal(table, Recipe)
    assert "unknown key" in said
    assert hint in said


@pytest.mark.parametrize(
    ("partition", "path"),
    [
        ({"kind": "dirichlet", "sites": 2, "beta": "x"}, "data.partition.beta = 'x'"),
        ({"kind": "shards", "sites": 2, "shards": "x"}, "data.partition.shards = 'x'"),
        ({"sites": 2}, "'data.partition.kind' is missing"),
    ],
)
def test_a_path_has_the_keys_that_were_written_and_no_kind_between_them(partition: dict[str, Any], path: str) -> None:
    assert refusal(recipe(data={"source": "digits", "partition": partition}), Recipe).startswith(path)


@pytest.mark.parametrize(
    ("name", "known", "similar"),
    [
        ("scaffold", ("solo", "fedavg"), ""),
        ("alpha", ("amp", "lr"), ""),
        ("cvs", ("csv", "json"), "csv"),
        ("fedNH", ("fednh", "fedprp"), "fednh"),
    ],
)
def test_only_what_a_typo_makes_is_suggested(name: str, known: tuple[str, ...], similar: str) -> None:
    assert nearest(name, known) == similar


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "fedavg"}, 'method = { name = "fedavg" }'),
        ({"data": {"source": "digits", "partition": "whole"}}, 'data.partition = { kind = "whole" }'),
        ({"data": "digits"}, 'data = { source = "digits" }'),
        ({"input": [1, 2]}, "[input] with its keys: colours, fit, frames, mean"),
    ],
)
def test_a_value_in_place_of_a_table_is_answered_by_what_to_write(changes: dict[str, Any], said: str) -> None:
    refused = refusal(recipe(**changes), Recipe)
    assert f"expected a table; write {said}" in refused
    assert "NamedOptions" not in refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = \u201cmine\u201d\n", 'line 1 has a typographic quote (\u201c); write " in its place'),
        ("a = 1\nname = \u2018mine\u2019\n", "line 2 has a typographic quote (\u2018)"),
        ('root = "C:\\Users\\ann"\n', 'line 1 has a \\ in double quotes; write a path as "C:/images"'),
        ('a = 1\nroot = "C:\\images"\n', "line 2 has a \\ in double quotes"),
        ("= 1", "Invalid"),
    ],
)
def test_what_a_text_processor_or_a_path_of_windows_makes_of_toml_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse_toml(text, "f is not TOML")
    assert str(found.value).startswith(f"f is not TOML: {said}")


def test_a_path_of_windows_that_toml_takes_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "s.toml").write_text('state = "C:\\temp"\n')
    with pytest.raises(ConfigError, match=r"state = .*control character"):
        read_settings(ServerSettings, file, {})


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b""])
@pytest.mark.parametrize("kind", FILES)
def test_a_byte_order_mark_of_windows_is_no_content(kind: str, mark: bytes, tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_bytes(mark + FILES[kind].read_bytes().replace(b"\n", b"\r\n"))
    assert read_table(tmp_path / "f.toml") == read_table(FILES[kind])
    (tmp_path / "f.toml").write_text("name = 'a'", encoding="utf-16")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_table(tmp_path / "f.toml")


@pytest.mark.parametrize(
    ("name", "similar"),
    [("South Clinic", "south-clinic"), ("Klinik Süd", "klinik-sud"), ("-x_1-", "x-1"), ("A" * 64, "a" * 64)],
)
def test_a_name_that_is_no_id_gets_one_that_is(name: str, similar: str) -> None:
    assert f"such as '{similar}'" in refusal({**SITE, "site": name}, ClientSettings)
    with pytest.raises(ConfigError, match=f"such as '{similar}'"):
        check_id("site", name)
    assert parse({**SITE, "site": similar}, ClientSettings, "f").site == similar


def test_a_name_without_letters_or_of_too_many_gets_none() -> None:
    assert "such as" not in refusal({**SITE, "site": "A" * 65}, ClientSettings)
    said = refusal({**SITE, "site": "город"}, ClientSettings)
    assert "such as" not in said
    assert "a-z, 0-9" in said


@pytest.mark.parametrize("quorum", [1.5, 0, -1, "half", 0.0])
def test_a_quorum_is_said_in_words(quorum: object) -> None:
    said = refusal(recipe(federation={"quorum": quorum}), Recipe)
    assert said.startswith(f"federation.quorum = {quorum!r}: expected a number of updates")
    assert "share" in said


def test_what_is_extended_loses_what_is_unset(tmp_path: Path) -> None:
    (tmp_path / "root.toml").write_text(f"{BASE}long_tail = 0.1\n[plan]\nlr = 0.5\nmax_grad_norm = 10.0\n")
    base = 'extends = "root.toml"\n[plan]\nmomentum = 0.9\n'
    unset = 'unset = ["plan.max_grad_norm", "data.long_tail"]\n'
    recipe = extending(tmp_path, base=base, text=f"{unset}[plan]\nepochs = 2\n")
    assert (recipe.plan.max_grad_norm, recipe.plan.lr, recipe.plan.momentum, recipe.plan.epochs) == (None, 0.5, 0.9, 2)
    assert recipe.data is not None
    assert (recipe.data.long_tail, recipe.data.source) == (None, "digits")


def test_a_table_that_is_unset_is_replaced(tmp_path: Path) -> None:
    text = 'unset = ["data", "method.prototype_momentum"]\n[data]\nsource = "spiral"\n'
    recipe = extending(tmp_path, base=BASE, text=text)
    assert recipe.method.options == {}
    assert recipe.data == Data(source="spiral")
    assert extending(tmp_path, base=BASE, text='unset = ["data"]\n').data is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('unset = ["plan.max_grad_norm"]', "'plan.max_grad_norm': base.toml sets no such key; remove it"),
        ('unset = ["methd.prototype_momentum"]', "did you mean 'method.prototype_momentum'?"),
        ('unset = ["data.source.kind"]', "base.toml sets no such key"),
        ('unset = ["data", "data"]', "'data': base.toml sets no such key"),
        ('unset = "data"', r"expected a list of keys and tables"),
        ("unset = [1]", r"expected a list of keys and tables"),
    ],
)
def test_an_unset_that_takes_nothing_out_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        extending(tmp_path, base=BASE, text=f"{text}\n")
    (tmp_path / "r.toml").write_text(f'unset = ["data"]\n{BASE}')
    with pytest.raises(ConfigError, match="add extends, or remove it"):
        read_recipe(tmp_path / "r.toml")
