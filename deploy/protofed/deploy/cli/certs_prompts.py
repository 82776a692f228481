"""Prompts of `protofed certs`: the code of a key, the passphrase of the CA's key."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from protofed.common.errors import ConfigError
from protofed.deploy.certs import files
from protofed.deploy.certs.authority import KEY, Authority, read_authority
from protofed.deploy.certs.request import Request, check_key
from protofed.deploy.cli.certs_output import Output

TRIES = 3


def confirm(request: Request, days: int, output: Output, fingerprint: str | None, where: str) -> None:
    """Show the request and its key's code, and return only if that is what the party reads out.

    Args:
        fingerprint: the code or fingerprint that the party read out; None: the person at the terminal types it, so that
            nobody signs by the return key.
        where: names the request in errors.

    Raises:
        ConfigError: it is another key's, three times at a terminal, or there is neither a code nor a terminal.
        typer.Abort: the person declined.
    """
    output.say(f"about to sign, for {days} days: {request.party} '{request.name}' {' '.join(request.hosts)}".rstrip())
    output.say(f"key: {request.code}")
    if fingerprint is not None:
        check_key(request, fingerprint, where)
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            "no terminal to ask on; have the party read you its key's code over the telephone (`protofed certs "
            "request` printed it there) and give that as --fingerprint"
        )
    for left in reversed(range(TRIES)):
        try:
            check_key(request, typer.prompt("Code that the party reads to you over the telephone", err=True), where)
            break
        except ConfigError as error:  # misheard, mistyped or another key: heard again, it tells which
            if not left:
                raise
            output.say(str(error), style="yellow")


def authority(folder: Path, passphrase_file: Path | None) -> Authority:
    """Read the CA in a folder; the passphrase, if its key needs one, comes from the file or the terminal.

    Raises:
        ConfigError: the folder holds no CA, or the passphrase is missing or wrong.
    """
    given = passphrase(passphrase_file)
    if given is None and files.is_encrypted(folder / KEY):
        if not sys.stdin.isatty():
            raise ConfigError(f"the key of the CA in {folder} is encrypted; give --passphrase-file")
        given = str(typer.prompt("Passphrase of the CA's key", hide_input=True)).encode()
    return read_authority(folder, given)


def passphrase(path: Path | None) -> bytes | None:
    """The first line of a passphrase file, without its line end; None without a file.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a file with the passphrase") from error
    if not lines or not lines[0]:
        raise ConfigError(f"{path} is empty; expected the passphrase in its first line")
    return lines[0]
