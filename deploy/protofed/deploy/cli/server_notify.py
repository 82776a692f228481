"""`protofed server notify`: a test message through each channel of `[notify]`."""

from __future__ import annotations

import json
import time

import typer
from rich.console import Console
from rich.text import Text

from protofed.common.errors import ConfigError, UnavailableError
from protofed.deploy.cli.options import AsJson, Settings

console = Console(soft_wrap=True)


def notify(settings: Settings = None, as_json: AsJson = False) -> None:
    """Send a test message by each webhook and mail server of the settings. Exit code 69 if one does not take it.

    Example: `protofed server notify --settings server.toml`
    """
    from protofed.common.config.settings import ServerSettings, read_settings
    from protofed.common.pki.certificate import Party
    from protofed.common.pki.identity import LiveIdentity
    from protofed.deploy.daemons.server_notify import server_name
    from protofed.deploy.logs import setup
    from protofed.server.notifications.channels import NotSentError, open_channels
    from protofed.server.notifications.wording import trial_notice

    server = read_settings(ServerSettings, settings, {})
    if server.notify is None:
        raise ConfigError("the settings have no [notify], so nobody is told; name the server's file: --settings FILE")
    setup.hide_server(server)
    channels = open_channels(server.notify)
    identity = None if server.identity is None else LiveIdentity(server.identity, Party.SERVER)
    message = trial_notice(server_name(identity, server.listen), time.time())
    results = dict[str, tuple[bool, str]]()
    for channel in channels:
        with Console(stderr=True).status(f"sending to {channel.name}"):
            try:
                results[channel.name] = True, channel.send(message)
            except NotSentError as error:
                results[channel.name] = False, str(error)
    if as_json:
        rows = [{"channel": name, "taken": taken, "answer": answer} for name, (taken, answer) in results.items()]
        print(json.dumps({"id": message.id, "channels": rows}, indent=2, ensure_ascii=False))  # noqa: T201
    else:
        for name, (taken, answer) in results.items():
            mark = Text("✓", style="green") if taken else Text("✗", style="bold red")
            console.print(Text.assemble(mark, f" {name}  {answer}"))
    if not all(taken for taken, _ in results.values()):
        raise typer.Exit(UnavailableError.exit_code)
