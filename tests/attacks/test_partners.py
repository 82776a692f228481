"""Whom a hospital is summed with: real daemons over mutual TLS, against whoever owns server, CA and registration.

The hospital's daemon, its files and its policy `standard` are as shipped. `aaa` and `zzz` are sites that the
coordinator invented, and issued certificates to: from a sum with these it would read the hospital's update.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import called
from tests.support.partners import confirm, listed
from tests.support.pki import Authority
from tests.support.processes import Processes

from protofed.client.secure_aggregation.partners import OFFERED
from protofed.common.pki.identity import Party
from protofed.common.protocol.consortium import read
from protofed.common.secure_aggregation.groups import in_order
from protofed.deploy.operator.connection import Operator
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.rounds.machine.rules import Grouping
from protofed.server.rounds.secure_aggregation.partners import PartnerList
from protofed.server.rpc.federation import FederationService
from protofed.testing.live_server import LiveServer
from protofed.testing.small_recipe import small_recipe

pytestmark = pytest.mark.timeout(300)
HOSPITAL, INVENTED = "north", ("aaa", "zzz")


RECIPE = small_recipe(
    "fednh",
    rounds=1,
    plan={"epochs": 1, "batch_size": 32, "lr": 0.05, "momentum": 0.9},
    data={"source": "digits", "partition": {"kind": "dirichlet", "sites": 3, "beta": 5.0}},
    federation={"secure": True, "min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.2, "score_every": 0},
)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Processes]:
    """A coordinator's folder, with a CA; no process is left running."""
    made = Processes.of(tmp_path, RECIPE)
    made.authority = Authority.make()
    yield made
    made.end()


def start(here: Processes, *sites: str, policy: str) -> None:
    for share, site in enumerate(sites):
        here.site(site, f"--partition-index={share}", policy=policy)


def operator(here: Processes) -> Operator:
    return Operator(here.address, here.identity(Party.OPERATOR, "operator"))


def log(here: Processes, site: str) -> str:
    return (here.folder / f"{site}.log").read_text()


def aggregated(here: Processes, site: str) -> bool:
    """Whether anything of a site ever left for a sum: its audit log has that first."""
    return any(
        b'"aggregated"' in file.read_bytes() or b'"masked"' in file.read_bytes()
        for file in (here.folder / site).glob("audit*")
    )


def waits(here: Processes, capfd: pytest.CaptureFixture[str]) -> str:
    """What the operator is told of the run."""
    identity = here.identity(Party.OPERATOR, "operator")
    return called(capfd, "runs", "show", here.recipe.name, f"--server={here.address}", f"--identity={identity}")[1]


def test_three_hospitals_are_aggregated_once_they_confirm(here: Processes, capfd: pytest.CaptureFixture[str]) -> None:
    sites = (HOSPITAL, "south", "west")
    here.server()
    start(here, *sites, policy="standard")
    told = "has not confirmed the list of partners"
    here.wait_for(lambda: all(f"{site} ({told})" in " ".join(waits(here, capfd).split()) for site in sites))
    with operator(here) as asked:
        found = asked.offer_consortium(asked.consortium("The Hub").proposed)
    assert (sorted(found.confirmed), sorted(found.waiting)) == ([], sorted(sites))
    code = read(found.offered).code
    for site in sites:
        state = here.folder / site
        here.wait_for((state / OFFERED).exists)
        confirming = "client", "consortium", "--confirm"
        assert called(capfd, *confirming, "0000-0000-0000-0000", f"--state={state}", "--yes")[0] == 78
        assert not aggregated(here, site)
        assert called(capfd, *confirming, code, f"--state={state}", "--yes")[0] == 0
    assert here.finish(["server", *sites]) == [0, 0, 0, 0]
    assert all(aggregated(here, site) for site in sites)


def offered_to_hospitals_alone(enroll: Any) -> Any:
    """The server's call, which shows no list to its own sites: they are summed with anybody."""

    async def enrolled(self: FederationService, request: pb.EnrollRequest, context: Any) -> pb.EnrollResponse:
        answer: pb.EnrollResponse = await enroll(self, request, context)
        if request.consortium == "":
            answer.consortium = ""
        return answer

    return enrolled


LISTS = ("nobody confirmed", "invented", "in the names of partners", "renamed hospital")


@pytest.mark.parametrize("lie", LISTS)
def test_a_server_with_the_ca_never_has_a_hospital_aggregated_with_sites_that_it_invented(
    here: Processes, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """The server counts the hospital as ready whatever it says, and puts it into a group with its own two."""
    monkeypatch.setattr(PartnerList, "admits", lambda _self, _site: True)
    monkeypatch.setattr(Grouping, "of", lambda _self, _known, sites: in_order([sites] if sites else []))
    monkeypatch.setattr(FederationService, "Enroll", offered_to_hospitals_alone(FederationService.Enroll))
    own = dict(zip(INVENTED, ("south", "west") if lie == "in the names of partners" else INVENTED, strict=True))
    server = LiveServer(here.recipe, here.folder / "server", identity=here.identity(Party.SERVER, "server"))
    try:
        here.address = server.address
        named = "south" if lie == "renamed hospital" else HOSPITAL  # it stays as it is but for its certificate
        partners = {site: here.folder / "partners" / site for site in ("south", "west")}
        for folder in partners.values():
            folder.mkdir(parents=True)
        (here.folder / named).mkdir()
        hospital = listed({HOSPITAL: here.folder / named, **partners})
        if lie != "nobody confirmed":
            confirm(here.folder / named, hospital)
            server.runs.partners.offered = hospital
        sites = (named, *own.values())
        start(here, *own.values(), policy="open")
        here.site(named, "--partition-index=2", policy="standard")
        if lie == "nobody confirmed":
            here.wait_for(lambda: "no list of partners is confirmed here" in log(here, named))
        else:
            code = {"invented": "no-partner"}.get(lie, "changed-identity")
            here.wait_for(lambda: f"secure-aggregation.{code}" in log(here, named))
        rounds = server.ledger.rounds(here.recipe.name)
        assert not [row for row in rounds if row.round and row.state is not None]
        assert not aggregated(here, named)
        here.wait_for(lambda: set(sites) == server.context.presence.known().keys())
    finally:
        server.stop()
