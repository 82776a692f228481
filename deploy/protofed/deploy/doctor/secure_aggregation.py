"""What a site alone, and a server alone, can tell of secure aggregation before there is one; nothing is written."""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, PolicyViolationError, SecureAggregationError, StateError, count
from protofed.common.payload import Part, SiteId
from protofed.common.pki import certificate
from protofed.common.pki.identity import Identity, check_endorsement, endorsed
from protofed.common.secure_aggregation.groups import Groups
from protofed.common.secure_aggregation.keys import threshold
from protofed.deploy.doctor.checks import CheckFailedError
from protofed.server.rounds.machine import rules

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from protofed.client.policy.policy import Policy

OTHERS = stat.S_IRWXG | stat.S_IRWXO
ALONE = "whether enough sites take part, one alone cannot see"


@dataclass(frozen=True)
class SiteSums:
    """The check of a site.

    Attributes:
        state: the site's state folder.
        certified: its certificate with its CAs; None: plain text.
        recipe: of the newest run that it was offered, or that it asks about; None: of none.
    """

    state: Path
    certified: Identity | None
    policy: Policy
    recipe: Callable[[], Recipe | None]
    now: datetime

    def check(self) -> str:
        """Identity, partners, endorsement, and the policy against the recipe.

        Raises:
            CheckFailedError: one of them is in the way of secure aggregation.
        """
        own, partners, group, agreed = self._identity(), self._partners(), self._group(), self._agreement()
        self._check_met()
        return f"{own}; {partners}; {group}; {agreed}; {ALONE}"

    def _identity(self) -> str:
        from protofed.client.secure_aggregation.partners import IDENTITY_FILE, load_identity

        path = self.state / IDENTITY_FILE
        if not path.exists():
            return f"no identity yet: the daemon makes {path} at its start"
        if (mode := stat.S_IMODE(path.stat().st_mode)) & OTHERS:
            raise CheckFailedError("sum-identity-unusable", f"{path} can be read by others (mode {mode:04o})")
        try:
            key = load_identity(self.state)
        except StateError as error:
            raise CheckFailedError("sum-identity-unusable", str(error)) from error
        return f"identity {_code(key)}, {self._endorsed(key)}"

    def _endorsed(self, key: Ed25519PrivateKey) -> str:
        if (certified := self.certified) is None:
            return "endorsed by no certificate (plain text)"
        site, public = certified.certificate.name, key.public_key().public_bytes_raw()
        try:
            check_endorsement(endorsed(certified, public), site, public, certified.authorities_pem, self.now)
        except (ConfigError, SecureAggregationError) as error:
            raise CheckFailedError("sum-identity-unusable", str(error)) from error
        return f"endorsed by the {certified.certificate}"

    def _partners(self) -> str:
        from protofed.client.secure_aggregation.partners import IDENTITY_FILE, Partners

        if not (self.state / IDENTITY_FILE).exists():  # no server can offer a list before it knows this site's key
            return "partners are confirmed once the daemon has started"
        partners, required = Partners(self.state), self.policy.rules.partners == "confirmed"
        try:
            problem, confirmed = partners.problem(required=required), partners.confirmed()
        except StateError as error:
            raise CheckFailedError("sum-identity-unusable", str(error)) from error
        recipe = self.recipe()
        if problem and (self.policy.rules.secure == "required" or (recipe is not None and recipe.federation.secure)):
            raise CheckFailedError("partners-unconfirmed", problem)
        if confirmed is None:
            return "no list of partners is confirmed"
        listed = confirmed.consortium
        return f"list {listed.number} of {count(len(listed.partners), 'partner')} confirmed by {confirmed.by}"

    def _check_met(self) -> None:
        """Check that nobody is believed on first use alone."""
        from protofed.client.secure_aggregation.partners import Partners

        partners = Partners(self.state)
        if partners.confirmed() is None and (met := partners.met()):
            text = f"{', '.join(met)} believed on first use: whoever signs certificates can invent such sites"
            raise CheckFailedError("partners-on-first-use", text)

    def _group(self) -> str:
        from protofed.client.secure_aggregation.sessions import FOLDER, pinned_in

        try:
            pin = pinned_in(self.state / FOLDER)
        except StateError as error:
            raise CheckFailedError("sum-identity-unusable", str(error)) from error
        if pin is None:
            return "in no group yet"
        text = f"in the group {', '.join(pin.group)} since {pin.at}"
        recipe = self.recipe()
        if recipe is None or not recipe.federation.secure:
            return text
        if len(pin.group) < (least := max(recipe.federation.sum_group, self.policy.rules.sum_group)):
            raise CheckFailedError(
                "run-refused", f"{text}; run {recipe.name} and the policy ask for {least} sites (sum_group)"
            )
        return text

    def _agreement(self) -> str:
        import torch

        from protofed.client.method import client_methods
        from protofed.client.models.catalogue import device_model
        from protofed.client.models.split import dump
        from protofed.client.policy.policy import PolicyRefusedError
        from protofed.common.secure_aggregation.linear_form import read_form

        rules, recipe = self.policy.rules, self.recipe()
        if recipe is None:
            return f"policy secure = {rules.secure}, with no run to compare it with (--recipe names one)"
        name, options = recipe.method.name, recipe.method.options
        method = client_methods.build(name, options, rules.plugins)
        form = read_form(method, name) if recipe.federation.secure else None
        try:
            if form is not None:
                self.policy.admit_group(recipe.federation.sum_group)
            self.policy.admit(name, method.sends, form, exchanges=method.declares.exchanges)
            if form is None and Part.HEAD in method.sends:  # as the daemon prepares the run
                head = device_model(recipe, torch.device("cpu"), rules.plugins).head
                self.policy.admit_head(dump(head), recipe.classes)
        except PolicyRefusedError as error:
            if error.rule in ("secure", "sum_group"):
                raise CheckFailedError("run-refused", f"run {recipe.name}: {error}") from error
        except (ConfigError, PolicyViolationError):
            pass  # of other rules, or no such model: `data` prepares the run, and says so
        how = "sums updates under masks" if form is not None else "has no secure aggregation"
        return f"run {recipe.name} {how}, which policy secure = {rules.secure} allows"


def server_message(recipe: Recipe, trainers: Collection[SiteId], groups: Groups = ()) -> str:
    """Whether the sites that are registered are enough for a run's sums, in words.

    Args:
        trainers: all that may take part.
        groups: that sites have since earlier sums.

    Raises:
        CheckFailedError: they are too few, or too few of them are in whole groups.
    """
    if problems := rules.unmet(recipe, frozenset(trainers), groups):
        raise CheckFailedError("sites-few", f"{recipe.name}: {'; '.join(problems)}")
    return f"{recipe.name}: {dropouts(len(trainers))}"


def dropouts(sites: int) -> str:
    """How many of so many sites a sum needs to its end."""
    stay, spare = threshold(sites), sites - threshold(sites)
    if not spare:
        return (
            f"{count(sites, 'site')}; secure aggregation needs all of them to its end: if one leaves, the attempt ends"
        )
    needed = f"{count(sites, 'site')}: secure aggregation needs {stay} to its end"
    return f"{needed}; {spare} may drop out after sending their vectors"


def _code(key: Ed25519PrivateKey) -> str:
    from protofed.client.secure_aggregation.partners import fingerprint

    return certificate.code(fingerprint(key.public_key().public_bytes_raw()))
