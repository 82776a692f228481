"""Codes of keys: what they are, what a person may type for them, and what a wrong one says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.common.errors import ConfigError
from protofed.common.pki.certificate import code, differences

DIGITS = "00443214c74254b635cf" + "f" * 44  # 80 bits that are Crockford's first 16 digits in order
CODE = "0123-4567-89AB-CDEF"
FINGERPRINTS = st.binary(min_size=32, max_size=32).map(bytes.hex)


def test_a_code_is_the_first_80_bits_in_crockfords_base32() -> None:
    assert code(DIGITS) == CODE
    assert code("0" * 64) == "0000-0000-0000-0000"
    assert code("f" * 64) == "ZZZZ-ZZZZ-ZZZZ-ZZZZ"
    assert code("f" * 20 + "0" * 44) == "ZZZZ-ZZZZ-ZZZZ-ZZZZ"
    assert code("f" * 19 + "e" + "0" * 44) == "ZZZZ-ZZZZ-ZZZZ-ZZZY"


AS_TYPED = [CODE, CODE.lower(), CODE.replace("-", ""), CODE.replace("-", " "), "OL23 4567 89ab cdef"]
WHOLE = [DIGITS, DIGITS.upper(), f"SHA256:{DIGITS}", " ".join([DIGITS[:30], DIGITS[30:]])]


@pytest.mark.parametrize("typed", AS_TYPED + WHOLE)
def test_a_code_however_it_is_written_and_the_whole_fingerprint_are_accepted(typed: str) -> None:
    assert differences(typed, DIGITS) == []


@given(FINGERPRINTS)
def test_no_code_has_a_letter_that_is_taken_for_a_digit(fingerprint: str) -> None:
    made = code(fingerprint)
    assert [len(group) for group in made.split("-")] == [4] * 4
    assert not set("ILOU") & set(made)
    assert differences(made, fingerprint) == []


@given(FINGERPRINTS, FINGERPRINTS)
def test_another_key_differs(one: str, other: str) -> None:
    assert bool(differences(code(one), other)) == (one[:20] != other[:20])
    assert bool(differences(one, other)) == (one != other)


def test_what_differs_is_counted_in_groups() -> None:
    assert differences("0123-4567-89AB-CDEG", DIGITS) == [4]
    assert differences("1123-4567-99AB-CDEF", DIGITS) == [1, 3]
    assert differences(DIGITS[:-1] + "e", DIGITS) == [16], "behind the 80 bits, the whole fingerprint still tells"


@pytest.mark.parametrize(
    "typed", ["", "0123-4567-89AB", "0123-4567-89AB-CDEU", DIGITS[:63], DIGITS + "0", "x" * 16 * 4]
)
def test_what_is_no_code_is_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match="expected four groups of four"):
        differences(typed, DIGITS)
