"""Masks: streams of ChaCha20 as words of the ring, added to vectors or taken from them."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protofed.common.payload import Array

KEY_BYTES = 32
_BLOCK_WORDS = 1 << 13  # 64 KiB, which stays in a core's cache: 4 GB/s, ten times that of single words
_NO_NONCE = bytes(16)  # each key makes one stream


def derived(secret: bytes, purpose: bytes) -> bytes:
    """A key of `KEY_BYTES` for one purpose."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


def add_mask(vector: Array, key: bytes, *, subtract: bool = False) -> None:
    """Add a key's stream to a vector [N] uint64 in place, or take it away.

    Args:
        key: of `KEY_BYTES`, used for this one stream.
    """
    encryptor = Cipher(algorithms.ChaCha20(key, _NO_NONCE), mode=None).encryptor()
    stream = bytearray(_BLOCK_WORDS * 8)
    zeros, words = bytes(len(stream)), np.frombuffer(stream, dtype="<u8")
    combine = np.subtract if subtract else np.add
    for begin in range(0, len(vector), _BLOCK_WORDS):
        piece = vector[begin : begin + _BLOCK_WORDS]
        encryptor.update_into(memoryview(zeros)[: piece.nbytes], memoryview(stream)[: piece.nbytes])
        combine(piece, words[: len(piece)], out=piece)
