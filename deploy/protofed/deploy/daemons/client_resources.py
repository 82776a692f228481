"""Opens what a daemon's settings name (identity, proxy, data), for the daemon and for its `doctor`."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError, DataError
from protofed.common.forms import utc_now
from protofed.common.pki.identity import IdentityError, IdentityProblem, LiveIdentity, Party

if TYPE_CHECKING:
    from protofed.client.transport.proxy import Proxy


def own_identity(settings: ClientSettings, clock: Callable[[], datetime] = utc_now) -> LiveIdentity | None:
    """The site's identity; None: plain text. `clock` says when certificates are valid.

    Raises:
        ConfigError: it cannot be used, or is another site's.
    """
    if settings.identity is None:
        return None
    identity = LiveIdentity(settings.identity, Party.SITE, clock)
    if (name := identity.current().certificate.name) != settings.site:
        text = f"the certificate in {settings.identity} is of site '{name}', and this is site '{settings.site}'; "
        raise IdentityError(
            IdentityProblem.ANOTHERS, text + "correct the setting `site`, or give its --identity folder"
        )
    return identity


def own_proxy(settings: ClientSettings) -> Proxy | None:
    """The proxy on the way to the server; None: there is none. Removes `no_proxy` from the environment.

    Raises:
        ConfigError: it cannot be used.
    """
    from protofed.client.transport.proxy import Proxy

    if settings.proxy is None:
        return None
    if settings.plaintext:
        raise ConfigError("proxy: plain text stays on this machine; remove the setting, or give --identity")
    for name in ("no_grpc_proxy", "no_proxy"):  # gRPC's C core reads them, and they would overrule the setting
        os.environ.pop(name, None)
    return Proxy.read(settings.proxy)


def check_root(settings: ClientSettings) -> None:
    """Check at the start that the data's folder exists: without this, the first run would fail hours later.

    Raises:
        DataError: it does not exist.
    """
    root = settings.data.place
    if root is not None and not root.exists() and not settings.data.download:
        raise DataError(f"no data at {root}; mount or copy them there, or correct data.root")
