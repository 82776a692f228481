"""Short codes of public keys, to be read out over the telephone.

A code is the first 80 bits of the key's fingerprint in Crockford's base32 (https://www.crockford.com/base32.html): 16
of 0-9 and A-Z without I, L, O and U, in four groups. Whoever swaps a request on its way must find a key with the same
code, a second preimage: about 2**80 keys. A code of six digits would take a million keys, which one core makes in half
a minute; such codes are safe only where both sides commit to their keys before either sees the other's.
"""

from __future__ import annotations

import base64
import re

from protofed.common.errors import ConfigError, short

BYTES = 10  # 80 bits
GROUP = 4
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ENCODE = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", _ALPHABET)  # from RFC 4648's alphabet
_FOLD = str.maketrans("OIL", "011")
_CODE, _HEX = re.compile(f"[{_ALPHABET}]{{16}}"), re.compile("[0-9a-f]{64}")


def code(fingerprint: str) -> str:
    """The code of a SHA-256 fingerprint of 64 hexadecimal digits, such as K7QF-2M4X-9RTA-HWZC."""
    letters = base64.b32encode(bytes.fromhex(fingerprint)[:BYTES]).decode("ascii").translate(_ENCODE)
    return "-".join(_groups(letters))


def differences(given: str, fingerprint: str) -> list[int]:
    """The groups, counted from 1, in which what somebody read out differs from a fingerprint; none: it is that one.

    Args:
        given: a code in upper or lower case, with or without hyphens, O, I and L for 0, 1 and 1; or all 64 hexadecimal
            digits, with or without spaces, colons and `SHA256:`.
        fingerprint: 64 hexadecimal digits.

    Raises:
        ConfigError: `given` is neither.
    """
    digits = re.sub(r"[\s:-]", "", given.lower().removeprefix("sha256:"))
    letters = digits.upper().translate(_FOLD)
    if _HEX.fullmatch(digits):
        pairs = zip(_groups(digits), _groups(fingerprint), strict=True)
    elif _CODE.fullmatch(letters):
        pairs = zip(_groups(letters), code(fingerprint).split("-"), strict=True)
    else:
        raise ConfigError(
            f"code {short(given)!r}: expected four groups of four, such as K7QF-2M4X-9RTA-HWZC, as `protofed certs "
            "request` prints them where the key is, and `protofed consortium offer`; or the fingerprint's 64 "
            "hexadecimal digits"
        )
    return [number for number, (ours, theirs) in enumerate(pairs, 1) if ours != theirs]


def _groups(text: str) -> list[str]:
    return [text[at : at + GROUP] for at in range(0, len(text), GROUP)]
