"""What a secure aggregation costs: a site's processor by step, its bytes, and the server's opening of the sum.

Beside the masks stands ChaCha20 alone, over as many bytes as there are masks: no mask of 64-bit words takes less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from tests.bench.report import Row
from tests.common.secure_aggregation.parties import Sum, identity_of
from tests.support.sum_server import SumServer

from protofed.client.models.catalogue import build
from protofed.client.models.split import dump
from protofed.client.secure_aggregation import session as steps
from protofed.client.secure_aggregation.session import Session
from protofed.common import codec
from protofed.common.codec import digest
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.payload import Array, Part, Payload, SiteId, Update, describe
from protofed.common.process import keep_memory
from protofed.common.protocol.messages import SumOf, TaskKind
from protofed.common.secure_aggregation import masking
from protofed.common.secure_aggregation.groups import alone
from protofed.common.secure_aggregation.keys import SumContext, Vector
from protofed.common.secure_aggregation.linear_form import POINT, SumForm, SumLayout

SITES = (5, 10, 50)
OF_GOALS = 10  # sites
REPETITIONS, FEW = 5, 2  # FEW: of fifty sites
STEPS = (TaskKind.FIT, TaskKind.SHARE, TaskKind.MASK, TaskKind.AGREE, TaskKind.REVEAL)  # of FIT the keys
MASKS, BARE = "masks", "bare"
PIECE = 1 << 16
CLASSES = 10
Answer: TypeAlias = tuple[Session, Payload]
T = TypeVar("T")
MODELS = {  # millions of parameters -> a model, and what it is given
    "1 M": (NamedOptions.model_validate({"name": "mlp", "hidden": [960]}), Input(shape=(1, 32, 32))),
    "11 M": (NamedOptions(name="resnet18"), Input(shape=(3, 32, 32))),
}
CONTEXT = SumContext("bench", 3, 1, SumOf.UPDATE, digest(b"recipe"), digest(b"base"), (Vector.VALUES,))


def rows() -> Iterator[Row]:
    """By model: a site's part with ever more sites, and what the server does at the end of a sum of ten."""
    keep_memory()  # as every daemon does
    torch.set_num_threads(1)
    for size, (choice, images) in MODELS.items():
        model = build(choice, images, CLASSES)
        update = Update("site-01", {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)})
        layout = SumLayout.of(SumForm((Part.BODY, Part.HEAD)), describe(update.payload), update.payload)
        for count in SITES:
            yield from of_site(f"secure aggregation, {size} × {count}", update, layout, count)
        yield from of_server(f"secure aggregation, {size} × {OF_GOALS}", layout.size)


# A site


def of_site(what: str, update: Update, layout: SumLayout, count: int) -> Iterator[Row]:
    """One site's steps: processor seconds of each, and bytes."""
    both = _masking(count, layout.words(update, POINT))
    masks, bare, ratio = (statistics.median(some) for some in (*zip(*both, strict=True), [m / b for m, b in both]))
    yield Row(f"{what}: a site's masks", masks, "s", bare, "ChaCha20 alone", ratio)
    turns = [_sum(update, layout, count) for _ in range(REPETITIONS if count <= OF_GOALS else FEW)]
    spent = {step: statistics.median(turn.seconds[step] for turn in turns) for step in STEPS}
    told = ", ".join(f"{step} {1000 * seconds:.1f}" for step, seconds in spent.items())
    goal = 0.5 if count == OF_GOALS else None
    yield Row(f"{what}: a site's processor", sum(spent.values()), "s", at_most=goal, note=f"ms: {told}")
    plain, sent = len(codec.encode(update.payload)) / 1e6, turns[0].sent / 1e6
    note = f"it is sent {turns[0].received / 1e6:.3f} MB beside the model"
    yield Row(
        f"{what}: bytes that a site sends", sent, "MB", plain, "the update", sent / plain, at_most=2.01, note=note
    )


@dataclass
class _Part:
    """What one site did: processor seconds by step, bytes."""

    seconds: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    received: int = 0

    def timed(self, step: str, work: Callable[[], T]) -> T:
        """The work's result."""
        began = time.process_time()
        result = work()
        self.seconds[step] = time.process_time() - began
        return result


def _sum(update: Update, layout: SumLayout, count: int) -> _Part:
    """The part of one site that masks the update; the others, of whom it needs keys and shares, mask one number."""
    names = [f"site-{number:02}" for number in range(1, count + 1)]
    part, server, one = _Part(), SumServer(CONTEXT, alone(names)), np.ones(1, np.uint64)

    def started(site: SiteId) -> Answer:
        session = steps.started(CONTEXT, layout, site, identity_of(site), b"")
        return session, steps.advertise(session)

    def worked(step: TaskKind, session: Session, blob: bytes) -> Answer:
        match step:
            case TaskKind.SHARE:
                return steps.share(session, blob, lambda _: None, pinned=None, fewest=1)
            case TaskKind.MASK:
                mine = session.site == names[0]
                return steps.send_values(session, blob, layout.words(update, POINT) if mine else one)
            case TaskKind.AGREE:
                return steps.agree(session, blob, Vector.VALUES, identity_of(session.site))
            case _:
                return steps.reveal(session, blob, Vector.VALUES)

    def answered(step: TaskKind, site: SiteId, work: Callable[[], Answer]) -> Session:
        def handed_in() -> tuple[Session, bytes]:
            session, payload = work()
            return session, codec.encode(payload)

        if site != names[0]:
            session, data = handed_in()
        else:
            session, data = part.timed(step, handed_in)
            part.sent += len(data)
        # Whose vectors have come is all that the next steps ask of them.
        server.take(step, site, b"" if step is TaskKind.MASK else data)
        return session

    sessions = {site: answered(TaskKind.FIT, site, partial(started, site)) for site in names}
    for step in STEPS[1:]:
        blobs = {site: server.blob(step, site) for site in names}
        part.received += len(blobs[names[0]])
        for site, blob in blobs.items():
            session = sessions[site]
            sessions[site] = answered(step, site, partial(worked, step, session, blob))
    return part


def _masking(count: int, words: Array) -> list[tuple[float, float]]:
    """Processor seconds of a site's masks alone, and of as many bytes of ChaCha20; in turns."""
    here, site = Sum.of(count), "site-01"
    masks, secrets, part, turns = here.masks(), here.parties[site].secrets, _Part(), []
    for _ in range(REPETITIONS):
        part.timed(BARE, lambda: chacha20(words.nbytes, count))
        part.timed(MASKS, lambda: masking.masked(masks, secrets, words))
        turns.append((part.seconds[MASKS], part.seconds[BARE]))
    return turns


def chacha20(size: int, times: int) -> None:
    """So many streams of so many bytes, into one buffer that stays in the core's cache."""
    zeros, stream = memoryview(bytes(PIECE)), memoryview(bytearray(PIECE))
    for _ in range(times):
        encryptor = Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), mode=None).encryptor()
        for begin in range(0, size, PIECE):
            left = min(PIECE, size - begin)
            encryptor.update_into(zeros[:left], stream[:left])


# The server


def of_server(what: str, size: int) -> Iterator[Row]:
    """Opening the sum: with all sites there, and with one that dealt its shares and sent no vector."""
    here = Sum.of(OF_GOALS)
    vector = np.random.default_rng(0).integers(0, 2**64, size, dtype=np.uint64)  # of all: the total is not looked at
    for dropouts, told in ((0, "all there"), (1, "one dropped out")):
        alive = here.included[dropouts:]
        masks, revealed = here.masks(), here.reveal(alive)
        streams = len(alive) + dropouts * len(alive)  # own masks; of the one that dropped out those with all others
        times = []
        for _ in range(REPETITIONS):
            part = _Part()
            part.timed(BARE, partial(chacha20, vector.nbytes, streams))
            seeds = part.timed("shares", partial(masking.opened, masks, alive, revealed))
            part.timed(MASKS, partial(masking.unmasked, masks, alive, repeat(vector, len(alive)), seeds))
            times.append(part.seconds)
        opening = statistics.median(turn["shares"] + turn[MASKS] for turn in times)
        bare = statistics.median(turn[BARE] for turn in times)
        ratio = statistics.median((turn["shares"] + turn[MASKS]) / turn[BARE] for turn in times)
        note = f"shares {1000 * statistics.median(turn['shares'] for turn in times):.0f} ms"
        yield Row(f"{what}: the server opens it, {told}", opening, "s", bare, "ChaCha20 alone", ratio, note=note)
