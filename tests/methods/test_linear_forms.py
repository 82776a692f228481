"""Methods under secure aggregation: exact sums give what updates give; no order counts, and no lonely class."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.method_facts import METHODS, SUMMABLE
from tests.support.round_contexts import round_context

from protofed.client.method import client_methods
from protofed.common import codec
from protofed.common.errors import ConfigError, SecureAggregationError, StateError
from protofed.common.payload import Array, Part, Payload, Update, describe
from protofed.common.protocol.messages import MAX_SECURE_SITES
from protofed.common.secure_aggregation.linear_form import POINT, ClassRows, SumForm, SumLayout, read_form
from protofed.server.method import ServerMethod, server_methods
from protofed.server.methods.mixtures import FACTORS, mixed
from protofed.server.rounds.secure_aggregation.totals import lay_out, next_state, unmasked_total

CLASSES, FEATURES, SITES = 4, 3, 3
TRUE = {"name": "cwfedavg", "shares": "true"}
BY_EXAMPLES = ("fedavg", "fedproc", "fedbabu", "fedadam", "creff", "fednova")
FORMS: Sequence[dict[str, Any]] = [
    *({"name": name} for name in SUMMABLE),
    *({"name": name, "weighting": "examples"} for name in BY_EXAMPLES),
    {"name": "fednh", "prototypes": "literal"},
    {"name": "fednh", "fixed_scale": True},
    {"name": "scaffold", "server_lr": 0.5},
    *(TRUE, {**TRUE, "layers": "head"}, {**TRUE, "weighting": "examples"}),
]
NONE: Sequence[dict[str, Any]] = [
    *({"name": name} for name in METHODS if name not in SUMMABLE),
    {"name": "fednh", "prototypes": "similarity"},
]
HELD = ({0, 1, 2}, {1, 2}, {2, 0})  # classes by site; nobody has the last one
by_name = pytest.mark.parametrize("options", FORMS, ids=lambda options: " ".join(map(str, options.values())))


def without_name(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "name"}


def half(options: Mapping[str, Any]) -> ServerMethod:
    return server_methods.build(options["name"], without_name(options))


def model(draw: Callable[..., Array], dtype: str = "float64") -> dict[Part, dict[str, Array]]:
    body = {"w": draw((FEATURES, 2)), "scale": draw(())}
    head = {"weight": draw((CLASSES, FEATURES)), "bias": draw((CLASSES,))}
    made = {Part.BODY: body, Part.HEAD: head}
    return {part: {name: np.asarray(array, dtype) for name, array in tensors.items()} for part, tensors in made.items()}


def with_counter(payload: Payload, seen: int) -> Payload:
    return {**payload, Part.BODY: {**payload[Part.BODY], "seen": np.array(seen)}}


def update(method: ServerMethod, state: Payload, site: int, held: set[int], dtype: str = "float64") -> Update:
    """A site's, with numbers of its own: whatever of it this method's updates have."""
    rng = np.random.default_rng(site)
    made: dict[Part, dict[str, Array]] = {**with_counter(model(rng.standard_normal, dtype), 0)}  # type: ignore[dict-item]
    if "scale" in state.get(Part.HEAD, {}):
        made[Part.HEAD] = {"scale": np.asarray(rng.uniform(1, 3), dtype)}
    rows = rng.standard_normal((CLASSES, FEATURES))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    made[Part.PROTOTYPES] = {str(c): unit[c].astype(dtype) for c in sorted(held)}
    present = np.isin(np.arange(CLASSES), sorted(held)).astype(dtype)
    made[Part.CLASS_PRESENCE] = {"present": present}
    p = present * rng.uniform(0.1, 1.0, CLASSES)
    made[Part.LABEL_DISTRIBUTION] = {"shares": (p / p.sum()).astype(dtype)}
    made[Part.STEPS] = {"steps": np.array(3 + site, np.float32)}
    expected = method.expects(state)
    rows_of_heads = [spec for spec in expected.optional if spec.part is Part.CLASS_GRADIENTS and int(spec.name) in held]
    made[Part.CLASS_GRADIENTS] = {spec.name: rng.standard_normal(spec.shape).astype(dtype) for spec in rows_of_heads}
    parts = {spec.part for spec in (*expected.required, *expected.optional)}
    for spec in expected.required:
        if spec.name not in made.get(spec.part, {}):
            made.setdefault(spec.part, {})[spec.name] = rng.standard_normal(spec.shape).astype(dtype)
    return Update(f"site-{site}", {part: made[part] for part in parts}, weight=float(10 + 7 * site))


def first(method: ServerMethod, dtype: str = "float64") -> Payload:
    return method.init(with_counter(model(np.random.default_rng(99).standard_normal, dtype), 0), round_context(CLASSES))


def updates_of(method: ServerMethod, state: Payload, dtype: str = "float64") -> list[Update]:
    return [update(method, state, site, held, dtype) for site, held in enumerate(HELD)]


def aggregated(method: ServerMethod, state: Payload, updates: Sequence[Update], fewest: int = 1) -> Payload:
    layout = lay_out(method, state)
    total = unmasked_total(layout, lambda: updates, POINT, fewest)
    return next_state(method, state, layout, total, POINT, round_context())


def comparable(payload: Payload) -> dict[str, Array]:
    """All tensors by path; of cwFedAVG the class models, whatever rows they are made of."""
    state = dict(payload)
    models = state.get(Part.CLASS_MODELS, {})
    if FACTORS in models:
        state.pop(Part.CLASS_SHARES, None)
        by_class = [mixed(models, weights) for weights in models[FACTORS]]
        state[Part.CLASS_MODELS] = {
            f"{c}.{part}.{name}": array
            for c, whole in enumerate(by_class)
            for part, tensors in whole.items()
            for name, array in tensors.items()
        }
    return {f"{part}/{name}": array for part, tensors in state.items() for name, array in tensors.items()}


@by_name
def test_exact_sums_give_what_the_updates_give(options: dict[str, Any]) -> None:
    method = half(options)
    state = by_sums = first(method)
    for _ in range(2):  # the second one from prototypes and class models that the first one has made
        updates = updates_of(method, state)
        state, by_sums = method.aggregate(state, updates, round_context()), aggregated(method, by_sums, updates)
    expected, result = comparable(state), comparable(by_sums)
    error = 1e-6 if "examples" in options.values() else 1e-9  # ten examples weigh 2**-16.7
    assert result.keys() == expected.keys()
    for path, array in expected.items():
        assert (result[path].dtype, result[path].shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(result[path], array, rtol=0, atol=error, err_msg=path)


@by_name
def test_both_halves_have_the_same_form(options: dict[str, Any]) -> None:
    form = read_form(client_methods.build(options["name"], without_name(options)), options["name"])
    assert form == read_form(half(options), options["name"])


@by_name
def test_the_order_of_sites_changes_no_bit(options: dict[str, Any]) -> None:
    method = half(options)
    state = first(method, "float32")
    updates = updates_of(method, state, "float32")
    after = [codec.encode(aggregated(method, state, order)) for order in itertools.permutations(updates)]
    assert len(set(after)) == 1


@by_name
def test_all_sites_are_sent_the_same(options: dict[str, Any]) -> None:
    method = half(options)
    state = first(method)
    for payload in (state, aggregated(method, state, updates_of(method, state))):
        assert codec.encode(method.broadcast(payload, "ann")) == codec.encode(method.broadcast(payload, "bob"))


@by_name
def test_site_and_server_lay_the_vector_out_alike(options: dict[str, Any]) -> None:
    method = half(options)
    state = first(method)
    state = aggregated(method, state, updates_of(method, state))
    layout, one = lay_out(method, state), update(method, state, 0, {1})
    of_site = SumLayout.of(layout.form, describe(one.payload), method.broadcast(state, one.site))
    assert of_site == layout
    assert len(of_site.numbers(one)) == layout.size


BY_CLASS = [options for options in FORMS if read_form(half(options), options["name"]).by_class]


@pytest.mark.parametrize("options", BY_CLASS, ids=lambda options: " ".join(map(str, options.values())))
def test_of_a_class_with_too_few_contributors_nothing_is_aggregated(options: dict[str, Any]) -> None:
    method = half(options)
    state = first(method)
    updates = updates_of(method, state)
    layout = lay_out(method, state)
    assert [int(n) for n in np.sum([layout.flags(one) for one in updates], axis=0)] == [2, 2, 3, 0]
    total = layout.named(POINT.decoded(unmasked_total(layout, lambda: updates, POINT, 3)))
    for key, by_class in total.items():
        if key in {"rows", "contributors", "mass"} or key.startswith("mixture/"):
            assert by_class[2].any()
            assert not by_class[[0, 1, 3]].any()
    kept, old = comparable(aggregated(method, state, updates, fewest=3)), comparable(state)
    if "prototypes/mean" in old:  # FedNH's row of a class that stays is made unit again
        np.testing.assert_allclose(kept["prototypes/mean"][[0, 1, 3]], old["prototypes/mean"][[0, 1, 3]], atol=1e-15)
        assert not np.allclose(kept["prototypes/mean"][2], old["prototypes/mean"][2])
    elif options["name"] == "creff":
        assert kept["private/known"].tolist() == [0, 0, 1, 0]
        moved = np.any(kept["private/features"] != old["private/features"], axis=(1, 2))
        assert moved.tolist() == [False, False, True, False]
    elif layout.form.rows is not None:
        assert {path for path in kept if path.startswith("prototypes/")} == {"prototypes/2"}


def test_a_class_that_is_not_aggregated_keeps_its_class_model() -> None:
    for options in (TRUE, {"name": "cwfedavg-private"}):
        method = half(options)
        state = first(method)
        after = aggregated(method, state, updates_of(method, state), fewest=3)
        heads = [method.class_model(payload, c)[Part.HEAD]["weight"] for payload in (state, after) for c in (0, 2)]  # type: ignore[attr-defined]
        np.testing.assert_array_equal(heads[0], heads[2])
        assert not np.allclose(heads[1], heads[3])


@pytest.mark.parametrize("options", NONE, ids=lambda options: " ".join(map(str, options.values())))
def test_a_method_without_a_linear_form_is_refused_by_name(options: dict[str, Any]) -> None:
    for made in (half(options), client_methods.build(options["name"], without_name(options))):
        with pytest.raises(ConfigError, match="(?i)" + options["name"]):
            read_form(made, options["name"])


def test_what_is_no_number_is_refused_with_the_site() -> None:
    method = half({"name": "fedavg"})
    state = first(method)
    updates = updates_of(method, state)
    broken = {**updates[1].payload, Part.HEAD: {**updates[1].payload[Part.HEAD], "bias": np.full(CLASSES, np.nan)}}
    with pytest.raises(StateError, match="site-1"):
        aggregated(method, state, [updates[0], replace(updates[1], payload=broken), updates[2]])


@pytest.mark.parametrize("sites", [0, 1, 2, MAX_SECURE_SITES + 1])
def test_a_sum_of_too_few_or_too_many_sites_is_refused(sites: int) -> None:
    method = half({"name": "fedavg"})
    state = first(method)
    with pytest.raises(StateError, match="3 to 50"):
        aggregated(method, state, [update(method, state, site, {0}) for site in range(sites)])


def test_what_is_not_of_the_layout_is_refused() -> None:
    method = half({"name": "fedprp"})
    state = first(method)
    layout, one = lay_out(method, state), update(method, state, 0, {1})
    longer = {"weight": np.zeros((FEATURES + 1, 2))}
    changes: Sequence[Payload] = [
        {Part.BODY: {}},
        {Part.BODY: {**one.payload[Part.BODY], "w": longer["weight"]}},
        {Part.PROTOTYPES: {str(CLASSES): np.zeros(FEATURES)}},
        {Part.PROTOTYPES: {"0": np.zeros(FEATURES + 1)}},
        {Part.PROTOTYPES: {"-1": np.zeros(FEATURES)}},
    ]
    for change in changes:
        with pytest.raises(SecureAggregationError):
            layout.numbers(replace(one, payload={**one.payload, **change}))
    with pytest.raises(SecureAggregationError, match="model has no"):
        SumLayout.of(layout.form, describe(one.payload), {Part.BODY: state[Part.BODY]})


def test_rows_as_large_as_what_they_are_like_have_one_row_a_class() -> None:
    method = half({"name": "creff"})
    state = first(method)
    layout, one = lay_out(method, state), update(method, state, 0, {1})
    shapes = {field.key: field.shape for field in layout.fields}
    assert shapes["rows"] == (CLASSES, CLASSES, FEATURES + 1)
    np.testing.assert_array_equal(layout.named(layout.numbers(one))["rows"][1], one.payload[Part.CLASS_GRADIENTS]["1"])
    for shape in ((FEATURES + 1,), (CLASSES, FEATURES)):
        with pytest.raises(SecureAggregationError):
            layout.numbers(replace(one, payload={**one.payload, Part.CLASS_GRADIENTS: {"1": np.zeros(shape)}}))


def test_a_form_by_counts_needs_the_count_and_one_by_class_one_flag() -> None:
    method = half({"name": "fedavg", "weighting": "examples"})
    state = first(method)
    with pytest.raises(SecureAggregationError, match="count"):
        lay_out(method, state).numbers(replace(update(method, state, 0, {0}), weight=None))
    rows = ClassRows(Part.PROTOTYPES, (Part.HEAD, "weight"))
    with pytest.raises(ValueError, match="not both"):
        SumForm((), rows=rows, mixtures=(Part.HEAD,), shares=Part.CLASS_PRESENCE)
    with pytest.raises(ValueError, match="shares"):
        SumForm((), mixtures=(Part.HEAD,))
