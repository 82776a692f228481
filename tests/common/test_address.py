"""Encrypted with both ends known, or plain text that was asked for and stays on the machine; nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed.common.address import NO_TLS, IdentityChoice, check_connection, choose_identity
from protofed.common.errors import ConfigError

IDENTITY = Path("identity")


@pytest.mark.parametrize("address", ["127.0.0.1:7443", "127.8.9.1:1", "localhost:0", "[::1]:65535"])
def test_plain_text_may_be_used_on_the_machine_itself(address: str) -> None:
    assert check_connection(address, NO_TLS) is None


@pytest.mark.parametrize(
    "address", ["0.0.0.0:7443", "[::]:7443", "192.0.2.7:7443", "example.org:7443", "localhost.example.org:1"]
)
def test_plain_text_leaves_the_machine_by_no_means(address: str) -> None:
    with pytest.raises(ConfigError, match="--identity"):
        check_connection(address, NO_TLS)


@pytest.mark.parametrize("address", ["127.0.0.1:7443", "0.0.0.0:7443", "fl.example.org:7443", "[2001:db8::7]:7443"])
def test_an_identity_may_be_used_anywhere(address: str) -> None:
    assert check_connection(address, IDENTITY) == IDENTITY


@pytest.mark.parametrize("address", ["127.0.0.1:7443", "fl.example.org:7443"])
def test_no_choice_is_refused_on_every_address_and_both_ways_out_are_said(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--identity FOLDER.*--identity none"):
        check_connection(address, None)


def test_a_folder_of_the_words_name_is_given_by_its_path() -> None:
    assert choose_identity("none") == NO_TLS
    assert choose_identity("./none") == Path("none")
    assert choose_identity(None) is None


@pytest.mark.parametrize("address", ["7443", ":7443", "host", "host:", "host:x", "host:65536", "host:７"])
@pytest.mark.parametrize("identity", [IDENTITY, NO_TLS])
def test_what_is_no_address_is_refused(address: str, identity: IdentityChoice) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        check_connection(address, identity)


@pytest.mark.parametrize("address", ["https://hub.example:7443", "grpc://hub.example:7443/", "hub.example/x:7443"])
def test_a_web_address_is_refused_and_the_address_in_it_is_said(address: str) -> None:
    with pytest.raises(ConfigError, match=r"such as hub\.example"):
        check_connection(address, IDENTITY)
