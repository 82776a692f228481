"""No password on a command line: everybody on the machine reads those, and a shell keeps them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from protofed.common.errors import ConfigError

INSTEAD: Final[Mapping[str, str]] = {  # option -> where its value may have a password
    "--proxy": "the environment variable PROTOFED_CLIENT_PROXY, or `proxy` in the --settings file",
    "--mlflow": "the environment variable PROTOFED_TRACKING_MLFLOW",
}
ELSEWHERE: Final = "an environment variable (PROTOFED_SERVER_LEDGER, PROTOFED_SERVER_MLFLOW, …) or the --settings file"
_CREDENTIALS = re.compile(
    r"://[^/@\s:]*:(?!\d{1,5}/)[^@\s]+@"  # user:password@, but for a port and a path with an @
    r"|://\S*[?&][\w.-]*(password|passwd|secret|token|api_?key)=[^&\s]",
    re.IGNORECASE,
)


def refuse_passwords(arguments: Sequence[str]) -> None:
    """Refuse a command line with a URL that has a password or a token.

    Args:
        arguments: the words after `protofed`.

    Raises:
        ConfigError: there is one; the text does not repeat it.
    """
    option = ""
    for word in arguments:
        name, assigned, _ = word.partition("=")
        is_option = word.startswith("--")
        option = name if is_option else option
        if _CREDENTIALS.search(word):
            raise ConfigError(
                f"{option or 'an argument'}: a URL with a password or a token on the command line, where everybody on "
                f"this machine can read it; put it into {INSTEAD.get(option, ELSEWHERE)}, and change the password"
            )
        option = "" if not is_option or assigned else option
