"""Updates held against the models that they started from."""

from __future__ import annotations

import threading

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.payload import Payload
from protofed.common.protocol.messages import Manifest
from protofed.server.rounds import screening
from protofed.server.storage.blobs import Blobs
from protofed.server.verdicts import UpdateProblem


class UpdateValidator:
    """Screens the bytes of one run's updates; may be called from several threads."""

    def __init__(self, blobs: Blobs, max_update_norm: float) -> None:
        self._blobs, self._max_norm = blobs, max_update_norm
        self._newest: tuple[Digest, Payload] | None = None  # a cohort's sites mostly start from the same model
        self._loading = threading.Lock()

    def examine(self, data: bytes, manifest: Manifest, base: Digest | None) -> UpdateProblem | float:
        """What is wrong with an update, or else its norm.

        Raises:
            StateError: the model that it started from cannot be read any more.
        """
        return screening.examined(data, manifest, None if base is None else self._model(base), self._max_norm)

    def _model(self, base: Digest) -> Payload:
        with self._loading:
            if self._newest is None or self._newest[0] != base:
                self._newest = base, codec.decode(self._blobs.get(base))
            return self._newest[1]
