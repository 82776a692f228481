"""What is wrong with an upload to a secure sum, if anything; what only the sum itself shows is not looked for."""

from __future__ import annotations

from dataclasses import dataclass

from protofed.common import codec
from protofed.common.codec import Buffer
from protofed.common.errors import CodecError, SecureSumError
from protofed.common.payload import Part, SiteId, TensorSpec
from protofed.common.protocol.messages import Manifest, TaskKind
from protofed.common.secure_aggregation.context import SumContext
from protofed.common.secure_aggregation.holders import check_vector
from protofed.common.secure_aggregation.keys import KeyAdvert, check_keys, check_signature
from protofed.common.secure_aggregation.masking import Revealed
from protofed.common.secure_aggregation.messages import (
    MESSAGE,
    VECTOR,
    Message,
    SharesMessage,
    SignatureMessage,
    message_of,
)
from protofed.common.secure_aggregation.survivors import check_signed
from protofed.server.rounds.sum_record import SumRecord, vector_of
from protofed.server.verdicts import RejectionCode, UpdateProblem

MOST_SITE_BYTES = 64 << 10  # of one site's message: one made of those of all sites must not be above MOST_MESSAGE_BYTES
_ANSWERS: dict[TaskKind, type[Message]] = {
    TaskKind.FIT: KeyAdvert,
    TaskKind.SCORE_SUM: KeyAdvert,
    TaskKind.SHARE: SharesMessage,
    TaskKind.HOLDERS: SignatureMessage,
    TaskKind.AGREE_HOLDERS: SignatureMessage,
    TaskKind.REVEAL_HOLDERS: Revealed,
    TaskKind.MASK: SignatureMessage,
    TaskKind.AGREE: SignatureMessage,
    TaskKind.REVEAL: Revealed,
}


def manifest_problem(manifest: Manifest, length: int | None) -> UpdateProblem | None:
    """Whether an upload announces a message, and a masked vector where one is asked for.

    Args:
        length: of the vector; None: there is to be none.
    """
    announced = {spec.name: spec for spec in manifest.tensors if spec.part is Part.SECURE_SUM}
    names = {MESSAGE} if length is None else {MESSAGE, VECTOR}
    if announced.keys() != names or len(manifest.tensors) != len(names):
        text = f"expected the tensors {', '.join(sorted(names))} of part {Part.SECURE_SUM}, and no others"
        return UpdateProblem(RejectionCode.TENSORS, text)
    message = announced[MESSAGE]
    if message.dtype != "uint8" or len(message.shape) != 1 or message.shape[0] > MOST_SITE_BYTES:
        text = f"the message is {message.dtype} {list(message.shape)}, expected uint8 [{MOST_SITE_BYTES} at most]"
        return UpdateProblem(RejectionCode.TENSORS, text)
    if length is not None and announced[VECTOR] != TensorSpec(Part.SECURE_SUM, VECTOR, "uint64", (length,)):
        vector = announced[VECTOR]
        text = f"the masked vector is {vector.dtype} {list(vector.shape)}, expected uint64 [{length}]"
        return UpdateProblem(RejectionCode.TENSORS, text)
    return None


@dataclass(frozen=True)
class SumCheck:
    """What a site's upload to one step is examined by.

    Attributes:
        record: what was sent before this step; None: the step is the first.
    """

    kind: TaskKind
    site: SiteId
    context: SumContext
    record: SumRecord | None

    def problem(self, data: Buffer, manifest: Manifest) -> UpdateProblem | None:
        """The problem with an upload's bytes. May be called from any thread."""
        try:
            if codec.manifest(data) != tuple(sorted(manifest.tensors, key=lambda spec: spec.path)):
                return UpdateProblem(RejectionCode.CONTENTS, "the upload holds other tensors than were announced")
            self._check(data)
        except CodecError as error:
            return UpdateProblem(RejectionCode.DAMAGED, str(error))
        except SecureSumError as error:
            return UpdateProblem(RejectionCode.SECURE_SUM, str(error))
        return None

    def _check(self, data: Buffer) -> None:
        """Raises: CodecError, SecureSumError."""
        message, vector = message_of(data, _ANSWERS[self.kind])
        if isinstance(message, KeyAdvert):
            self._check_advert(message)
            return
        assert self.record is not None  # noqa: S101  (of every later step)
        about = vector_of(self.kind)
        masks, survivors = self.record.masks(about), self.record.survivors(about)
        match message:
            case SharesMessage(sealed):
                self._check_sites("shares", sealed.keys(), self.record.roster.by_site.keys() - {self.site})
            case SignatureMessage(signature) if self.kind is TaskKind.HOLDERS and vector is not None:
                check_vector(masks, self.site, vector, signature)
            case SignatureMessage(signature) if self.kind is not TaskKind.MASK:
                check_signed(masks, survivors, self.site, signature)
            case Revealed(self_seeds, mask_seeds):
                self._check_sites("shares of self masks", self_seeds.keys(), set(survivors))
                self._check_sites("shares of mask keys", mask_seeds.keys(), set(masks.included) - set(survivors))

    def _check_advert(self, advert: KeyAdvert) -> None:
        vectors = len(self.context.vectors)
        if advert.site != self.site or (len(advert.mask_keys), len(advert.commitments)) != (vectors, vectors):
            raise SecureSumError("bad-keys", f"expected the keys of {self.site} for {vectors} vectors")
        check_signature(advert.identity, advert.signature, self.context.bind("keys", advert.facts), self.site)
        check_keys(advert)  # in a roster they would end the sum of all sites

    def _check_sites(self, what: str, given: object, expected: object) -> None:
        if given != expected:
            raise SecureSumError("bad-shares", f"{what}: expected those of this step's sites, each once")


def length_of(kind: TaskKind, numbers: int, classes: int) -> int | None:
    """The length of the masked vector that answers a step; None: there is none."""
    lengths = {TaskKind.HOLDERS: classes, TaskKind.MASK: numbers}
    return lengths.get(kind)


def is_for_sum(manifest: Manifest) -> bool:
    """Whether what is announced is for a secure sum."""
    return any(spec.part is Part.SECURE_SUM for spec in manifest.tensors)
