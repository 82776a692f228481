"""`protofed client peers …`: whose identities this site trusts in secure sums."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protofed.common.clock import stamp, utc_now
from protofed.common.pki import codes
from protofed.deploy.cli.confirmation import Yes, confirm
from protofed.deploy.cli.options import AsJson

console = Console()
State = Annotated[Path, typer.Option(help="The state folder of the site's daemon.")]
Site = Annotated[str, typer.Argument(help="Another site's id.")]
peers = typer.Typer(no_args_is_help=True, help="List, pin and forget the other sites' identities in secure sums.")


@peers.command("list")
def list_(state: State, as_json: AsJson = False) -> None:
    """List the pinned identities, and this site's own, by codes that can be read out over the telephone.

    Example: `protofed client peers list --state /var/lib/protofed`
    """
    from protofed.client.sums import own_identity
    from protofed.client.sums.own_identity import fingerprint
    from protofed.client.sums.peers import Peers
    from protofed.deploy.site import decide

    decide.act_as_owner(state)
    own = fingerprint(own_identity.load_or_create(state).public_key().public_bytes_raw())
    pins = Peers(state).pins()
    if as_json:
        rows = [{"site": site, "code": peer.code, **asdict(peer)} for site, peer in pins.items()]
        print(json.dumps({"own": {"code": codes.code(own), "fingerprint": own}, "peers": rows}, indent=2))  # noqa: T201
        return
    _say(f"this site  {codes.code(own)}")
    for site, peer in pins.items():
        _say(f"{site}  {peer.code}  pinned {peer.at} {f'by {peer.by}' if peer.by else 'on first use'}")
        if peer.is_contested:
            _say(f"  refused since: {codes.code(peer.refused)}; ask a person at {site} which code is theirs")
    if not pins:
        _say("no other site is pinned yet: each is, on first use, in the first secure sum with it")


@peers.command("pin")
def pin(
    site: Site,
    code: Annotated[str, typer.Argument(help="As a person at that site reads it out from `peers list`.")],
    state: State,
    yes: Yes = False,
) -> None:
    """Pin a site's identity by the code that a person there reads out, in place of the one pinned before.

    Example: `protofed client peers pin north K7QF-2M4X-9RTA-HWZC --state /var/lib/protofed`
    """
    from protofed.client.state.decisions import Act, Decision
    from protofed.client.sums.peers import Peers
    from protofed.deploy.site import decide

    decide.act_as_owner(state)
    pins = Peers(state)
    before = pins.pins().get(site)
    if before is not None and not yes:
        confirm(f"Pin {site} anew, in place of {before.code}?")
    pinned = pins.pin(site, code, decide.user_name())
    decide.record(state, Decision(Act.PIN, pinned.at, pinned.by, peer=site, code=pinned.code))
    then = "the daemon goes by it from the next sum on"
    if before is None:
        then = (
            f"no site of that name has been met yet: it counts once one is (if mistyped: `client peers forget {site}`)"
        )
    _say(f"pinned: {site}  {pinned.code}; {then}")


@peers.command("forget")
def forget(site: Site, state: State, yes: Yes = False) -> None:
    """Forget a site's identity: the one that it comes with next is pinned.

    Example: `protofed client peers forget north --state /var/lib/protofed`
    """
    from protofed.client.state.decisions import Act, Decision
    from protofed.client.sums.peers import Peers
    from protofed.deploy.site import decide

    decide.act_as_owner(state)
    if not yes:
        confirm(f"Forget {site}, and pin whichever endorsed identity it comes with next?")
    Peers(state).forget(site)
    decide.record(state, Decision(Act.FORGET, stamp(utc_now()), decide.user_name(), peer=site))
    _say(f"forgotten: {site}")


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
