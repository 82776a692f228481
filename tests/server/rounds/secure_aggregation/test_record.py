"""What a server turns away of one site, so that it does not end the sum of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.common.secure_aggregation.parties import CONTEXT, identity_of
from tests.server.conftest import announce

from protofed.common.protocol.messages import TaskKind
from protofed.common.secure_aggregation.keys import ROOT_BYTES, KeyAdvert, SiteSecrets, advertised
from protofed.common.secure_aggregation.messages import payload_of
from protofed.server.rounds.secure_aggregation.record import SumCheck, manifest_problem
from protofed.server.verdicts import RejectionCode, UpdateProblem

CHECK = SumCheck(TaskKind.FIT, "ann", CONTEXT, None)
SOUND = advertised(SiteSecrets(bytes(ROOT_BYTES), CONTEXT, "ann"), identity_of("ann"), b"")
CHANGES = {
    "twice the same": {"share_key": SOUND.mask_keys[0]},
    "of no secret": {"share_key": bytes(32)},
    "of another size": {"mask_keys": (b"short", SOUND.mask_keys[1])},
}


def signed(advert: KeyAdvert) -> KeyAdvert:
    return replace(advert, signature=identity_of("ann").sign(CONTEXT.bind("keys", advert.facts)))


def problem_of(advert: KeyAdvert) -> UpdateProblem | None:
    manifest, data = announce(payload_of(advert))
    return CHECK.problem(data, manifest)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_keys_that_would_end_the_sum_of_all_are_refused_to_their_site(change: dict[str, bytes]) -> None:
    assert problem_of(signed(SOUND)) is None
    problem = problem_of(signed(replace(SOUND, **change)))  # type: ignore[arg-type]
    assert problem is not None
    assert (problem.code, "key" in problem.text) == (RejectionCode.SECURE_SUM, True)


def test_a_message_with_which_the_roster_would_be_too_large_is_refused() -> None:
    manifest, _ = announce(payload_of(signed(replace(SOUND, endorsement=bytes(1 << 20)))))
    problem = manifest_problem(manifest, None)
    assert problem is not None
    assert "uint8 [65536 at most]" in problem.text
    assert manifest_problem(announce(payload_of(SOUND))[0], None) is None
