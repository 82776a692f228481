"""What `protofed certs` asks of a person: that a fingerprint was compared, and the passphrase of a CA's key."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.console import Console

from protofed.common.errors import ConfigError
from protofed.deploy.certs import files
from protofed.deploy.certs.authority import KEY, Authority, read_authority
from protofed.deploy.certs.request import Request


def confirm(asked: Request, days: int, console: Console, *, yes: bool) -> None:
    """Show what is about to be signed, and go on only if a person says that it is right.

    Raises:
        ConfigError: there is no terminal, and `yes` was not given.
        typer.Abort: the person says no.
    """
    console.print(f"about to sign, for {days} days: {asked.party} '{asked.name}' {' '.join(asked.hosts)}", markup=False)
    console.print(f"key: {asked.fingerprint}", markup=False)
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to ask; compare the key's fingerprint with the party's, then give --yes")
    typer.confirm("Is this the fingerprint that the party reads to you over the telephone?", abort=True)


def authority(folder: Path, passphrase_file: Path | None) -> Authority:
    """The CA in a folder, with the passphrase from the file or from the terminal if its key needs one.

    Raises:
        ConfigError: there is none, or no passphrase, or not the right one.
    """
    given = passphrase(passphrase_file)
    if given is None and files.is_encrypted(folder / KEY):
        if not sys.stdin.isatty():
            raise ConfigError(f"the key of the CA in {folder} is encrypted; give --passphrase-file")
        given = str(typer.prompt("Passphrase of the CA's key", hide_input=True)).encode()
    return read_authority(folder, given)


def passphrase(path: Path | None) -> bytes | None:
    """The first line of a file, if there is one to read.

    Raises:
        ConfigError: it cannot be read, or is empty.
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
