"""What a simulation and its workers tell each other: a JSON header, and payloads in the codec's encoding behind it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from protofed.client.agent.computation import ScoredModel
from protofed.client.data.shared import Contents
from protofed.common.codec import Digest
from protofed.common.payload import Part, SiteId
from protofed.common.protocol.messages import Task

_LENGTH = struct.Struct("!I")  # of the header in bytes


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Beginning(_Header):
    """The first message of a simulation to a worker; no frames.

    Attributes:
        recipe: as `Recipe.model_dump_json` gives it.
        plugins: those that the sites' policy allows.
        data: where in the block of data everything stands.
    """

    recipe: str
    plugins: frozenset[str]
    device: str
    data: Contents


class Work(_Header):
    """One computation; the frames are the base, if it is `sent`, the site's memory, and its own model, if it is used.

    Attributes:
        number: of the work; the result has the same.
        recipe: digest of the run's recipe as the site was offered it, which noise follows from; None: there is none.
        sent: whether the base is among the frames; else it is the one of the work before.
        own_model: whether the site's own model is.
    """

    number: int
    site: SiteId
    task: Task
    state_round: int
    seed: int
    fewest: int
    recipe: Digest | None
    scored: ScoredModel | None
    sent: bool
    own_model: bool


class Result(_Header):
    """What a computation gave; the frames of a fit are the update, the memory and the site's own model.

    Attributes:
        failed: what the error said, if it failed; nothing else is there then.
        trained: examples that a fit trained on, repetitions counted.
        shared: parts of the own model that are those of the update, and are not sent twice.
    """

    number: int
    failed: str | None = None
    scores: dict[str, float] | None = None
    metrics: dict[str, float] = {}
    weight: float | None = None
    trained: int = 0
    shared: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Message:
    """A header as JSON and the frames behind it."""

    header: str
    frames: Sequence[bytes] = ()

    @property
    def buffers(self) -> list[bytes]:
        """All bytes of the message, in their order."""
        sizes = [len(frame) for frame in self.frames]
        head = json.dumps({"header": self.header, "frames": sizes}).encode()
        return [_LENGTH.pack(len(head)) + head, *self.frames]


def read(exactly: Callable[[int], bytes]) -> Message:
    """The next message.

    Args:
        exactly: reads so many bytes.
    """
    (length,) = _LENGTH.unpack(exactly(_LENGTH.size))
    head: dict[str, Any] = json.loads(exactly(length))
    return Message(head["header"], [exactly(size) for size in head["frames"]])
