"""`methods` of the policies that come with protofed: all methods that a policy's other rules admit.

A site's list is complete and is read by people, so it stands in the file; nobody keeps it by hand. `make policies`
writes it, after a method has come or its parts or a rule have changed.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace

from protofed.client.method import client_methods
from protofed.client.policy.policy import Policy, PolicyRefusedError
from protofed.common.errors import ConfigError
from protofed.common.secure_aggregation.linear_form import read_form
from protofed.deploy import shipped

METHODS = re.compile(r"^methods = \[.*?\]$", re.MULTILINE | re.DOTALL)
WIDTH = 118


def admitted(policy: Policy) -> list[str]:
    """The methods that a policy which names them admits, with secure aggregation or without."""
    naming_all = replace(policy, rules=policy.rules.model_copy(update={"methods": frozenset(client_methods)}))
    return [name for name in client_methods if any(_admits(naming_all, name, secure) for secure in (False, True))]


def filled_in(text: str, methods: list[str]) -> str:
    """The text of a policy with these names as its methods."""
    names = textwrap.fill(
        ", ".join(f'"{name}"' for name in methods),
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    return METHODS.sub(f"methods = [\n{names},\n]", text, count=1)


def _admits(policy: Policy, name: str, secure: bool) -> bool:
    half = client_methods.build(name, {})
    try:
        form = read_form(half, name) if secure else None
        if policy.rules.secure == "required" and form is not None and form.mixtures:
            return False  # sums of whole heads by class: two classes whose sites differ by one give that site's head
        policy.admit(name, half.sends, form, exchanges=half.declares.exchanges)
    except (ConfigError, PolicyRefusedError):
        return False
    return half.declares.own_losses <= policy.rules.limits.losses


def main() -> None:
    for path in sorted(shipped.folder("policies").glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        path.write_text(filled_in(text, admitted(Policy.read(path))), encoding="utf-8")


if __name__ == "__main__":
    main()
