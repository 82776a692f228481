"""What the documents say of each method, made from its two halves and their docstrings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from docs.markdown import first_lines, table

from protofed.client.method import ClientMethod, client_methods
from protofed.client.policy.policy import Policy, PolicyRefusedError
from protofed.common.errors import ConfigError
from protofed.common.payload import FROM_THE_SERVER, NOT_ON_THE_WIRE, Exchange, Part
from protofed.common.secure_aggregation.linear_form import SumForm, read_form
from protofed.deploy.shipped import files
from protofed.server.method import server_methods

ROOT = Path(__file__).parents[1]
NO = "–"
LAST_FIT = "what the site's last training left"
OTHERS = {Exchange.RECEIVE: "a site gets models of others", Exchange.SHARE: "a site's model goes on to others"}


def sends(name: str) -> frozenset[Part]:
    """The parts that a method sends unless its options change that."""
    return client_methods.build(name, {}).sends


def parts() -> str:
    """What each part discloses, and which methods send it."""
    rows = []
    for part in Part:
        if part not in NOT_ON_THE_WIRE:
            senders = ", ".join(f"`{name}`" for name in client_methods if part in sends(name))
            rows.append([f"`{part}`", part.discloses, senders or _not_by_a_method(part)])
    return table(["part", "what it discloses", "sent by"], rows)


def _not_by_a_method(part: Part) -> str:
    if part is Part.SECURE_AGGREGATION:
        return "sites in runs with federation.secure = true"
    return "the server alone" if part in FROM_THE_SERVER else "no method of this version"


def methods() -> str:
    """All methods: what a site and the server do in a round, what of the model is not sent, where it comes from."""
    rows = [
        [
            f"`{name}`",
            first_lines(client_methods.get(name)),
            first_lines(server_methods.get(name)),
            _kept(name),
            _own_model(name),
            server_methods.about(name).source or NO,
        ]
        for name in client_methods
    ]
    titles = ["a site in a round", "the server", "not sent of the model", "a site predicts with", "source"]
    return table(["method", *titles], rows)


def disclosures() -> str:
    """Who sees what of each method's updates, with its default options, and which shipped policies take part."""
    rows = []
    for name in client_methods:
        half = client_methods.build(name, {})
        form = _form(half, name)
        rows.append(
            [
                f"`{name}`",
                ", ".join(f"`{part}`" for part in sorted(half.sends)) or "nothing",
                NO if form is None else "their sum alone",
                "; ".join(OTHERS[exchange] for exchange in sorted(half.declares.exchanges)) or NO,
                _admitted(half, name, None),
                NO if form is None else _admitted(half, name, form),
            ]
        )
    titles = [
        "the server reads",
        "in a secure aggregation",
        "between sites",
        "policies",
        "policies, in secure aggregation",
    ]
    return table(["method", *titles], rows)


def _admitted(half: ClientMethod, name: str, form: SumForm | None) -> str:
    """The shipped policies that take part in such a run."""

    def takes_part(policy: Policy) -> bool:
        try:
            policy.admit(name, half.sends, form, exchanges=half.declares.exchanges)
        except PolicyRefusedError:
            return False
        return True

    read = {policy: Policy.read(path) for policy, path in files("policies").items()}
    return ", ".join(f"`{policy}`" for policy, rules in read.items() if takes_part(rules)) or "none"


def exports() -> str:
    """Which models of each method can be exported."""
    rows = []
    for name in client_methods:
        server = server_methods.get(name)
        of_all = _global_model(name) if server.global_model else NO
        by_class = first_lines(server.class_model) if hasattr(server, "class_model") else NO
        rows.append([f"`{name}`", of_all, by_class, _own_model(name)])
    return table(["method", "`--model global`", "`class:N`", "`personal`"], rows)


def sums() -> str:
    """What of each method is summed under secure aggregation, with its default options."""
    return table(["method", "sums"], ([f"`{name}`", _sums(name)] for name in client_methods))


def halves(name: str) -> str:
    """Both halves of a method as the code has them, folded: to be read beside its section and the paper's algorithm."""
    blocks = [_block(half) for half in (client_methods.get(name), server_methods.get(name))]
    summary = f"<summary>The two halves of {server_methods.about(name).title} in the code</summary>"
    return "\n\n".join([f'<details class="halves" markdown="1">\n{summary}', *blocks, "</details>"])


def _block(half: type) -> str:
    path = Path(inspect.getfile(half)).relative_to(ROOT)
    return f'```python title="{path}"\n{source(half)}\n```'


def source(half: type) -> str:
    """A half's class, with what it inherits of its module and the module's functions that it calls."""
    module = inspect.getmodule(half)
    classes = [base for base in reversed(half.__mro__) if base.__module__ == half.__module__]
    text = "\n\n\n".join(inspect.getsource(base).rstrip() for base in classes)
    functions = inspect.getmembers(module, lambda one: inspect.isfunction(one) and one.__module__ == half.__module__)
    called = [inspect.getsource(one).rstrip() for name, one in functions if re.search(rf"\b{name}\(", text)]
    return "\n\n\n".join([text, *called])


def _kept(name: str) -> str:
    own_parts = [part for part in (Part.BODY, Part.HEAD) if part not in sends(name)]
    return {0: NO, 1: f"**the {own_parts[0] if own_parts else ''}**", 2: "**the model**"}[len(own_parts)]


def _own_model(name: str) -> str:
    half = client_methods.get(name)
    return LAST_FIT if half.declares.personal == "trained" else _installed(half)


def _global_model(name: str) -> str:
    """What an evaluator installs: it has trained nothing, and so has no model of its own."""
    half = client_methods.get(name)
    installed = half.declares.personal == "loaded"
    return "the global model" if installed else _installed(half).partition(";")[0].rstrip(".")


def _installed(half: type[ClientMethod]) -> str:
    return first_lines(half.load_global).removeprefix("Load ").rstrip(".")


def _form(half: ClientMethod, name: str) -> SumForm | None:
    try:
        return read_form(half, name)
    except ConfigError:
        return None


def _sums(name: str) -> str:
    half = client_methods.build(name, {})
    try:
        form = read_form(half, name)
    except ConfigError as error:
        return f"none: {error}" if hasattr(half, "sum_form") else "none"
    w = "w " if "weighting" in client_methods.options(name) | server_methods.options(name) else ""
    means = f"{', '.join(f'{w}{part}' for part in form.means)}, {w.strip() or 1}" if form.means else ""
    return "; ".join(filter(None, [means, _by_class(form, w)]))


def _by_class(form: SumForm, w: str) -> str:
    if form.rows is not None:
        row = "g_c" if form.rows.whole else "μ_c"
        return f"for each class 1_c {row} and 1_c"
    if not form.mixtures:
        return ""
    share = f"{w}p_c" if form.shares is not Part.CLASS_PRESENCE else f"{w}1_c"
    return f"for each class {share} {' and '.join(form.mixtures)}, and {share}"
