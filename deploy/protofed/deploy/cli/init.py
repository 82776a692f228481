"""`protofed client init` and `protofed server init`: the files that a daemon starts from, and what to do next."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from protofed.common.errors import ConfigError
from protofed.deploy.cli import completion
from protofed.deploy.cli.certs_output import Output, install_certificate
from protofed.deploy.cli.options import say

SETTINGS, POLICY = "site.toml", "policy.toml"
Into = Annotated[Path, typer.Option(help="Folder to write into; made if it is missing.")]


def init_client(
    site: Annotated[str | None, typer.Option(help="This site's id: a-z, 0-9 and '-'.")] = None,
    institution: Annotated[str, typer.Option(help="The institution's name, for the list of partners.")] = "",
    server: Annotated[str | None, typer.Option(help="host:port of the coordinator's server.")] = None,
    data: Annotated[str | None, typer.Option(help="Layout of the data: folder (default), manifest, npz …")] = None,
    root: Annotated[
        str | None, typer.Option(help="Where the data are: the folder of images, the .csv or the .npz.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="The policy to copy: standard (default), strict or open. It is the site's own to change.",
            autocompletion=completion.policies,
        ),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="OWN=RUN: own name of a class, and the run's. May be repeated.")
    ] = None,
    role: Annotated[list[str] | None, typer.Option(help="trainer or evaluator. Repeat for both.")] = None,
    into: Into = Path(),
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="The bundle that the coordinator sent back. It names the site. Installed in the folder identity."
        ),
    ] = None,
    ca_code: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Code of the bundle's CA, as its operator read it to you. May be repeated."),
    ] = None,
) -> None:
    """Write site.toml, policy.toml and the folders of a new site. Asks at a terminal for what is not given.

    Overwrites nothing. Ends with the next commands. With --bundle, also does what `protofed certs install` does.

    Example: `protofed client init --site north --server hub.example:7443 --data folder --root images`
    """
    from protofed.common.config.data import SOURCES
    from protofed.deploy import shipped
    from protofed.deploy.templates.new import NewSite, check_free, describe_layout, write_new

    site = _named(bundle, site) or _ask("--site", "This site's id (a-z, 0-9, '-'; as the coordinator calls it)")
    server = server or _ask("--server", "Address of the coordinator's server (host:port)")
    data = data or _ask("--data", f"Layout of the data ({', '.join(SOURCES)})", "folder")
    if root is None and (usual := describe_layout(data)["root"]):
        root = _ask("--root", "Where they are", usual)
    policy = policy or _ask("--policy", "Policy (standard, strict, open)", "standard")
    text = shipped.named("policy", policy).read_text(encoding="utf-8")
    new = NewSite(site, server, data, root or "", POLICY, role or ["trainer"], _labels(label or ()), institution)
    files = {SETTINGS: new.settings(), POLICY: text}
    if bundle is not None:
        check_free(into, files)  # all that can be refused is, before the certificate is installed
        install_certificate(bundle, into / "identity", Output(), ca_codes=ca_code or ())
    _show_made(write_new(into, files, ("identity", "state")))
    _show_next(into, *_site_steps(site, certified=bundle is not None))


def init_server(
    host: Annotated[
        str, typer.Option(help="Name or address at which sites reach this machine. It goes into the certificate.")
    ] = "",
    listen: Annotated[str, typer.Option(help="host:port; 0.0.0.0: every address of this machine.")] = "0.0.0.0:7443",
    into: Into = Path(),
) -> None:
    """Write server.toml and the folders of a new server. Overwrites nothing. Ends with the next commands.

    Example: `protofed server init --host hub.example`
    """
    from protofed.deploy.templates.new import server_settings, write_new

    folders = ("identity", "identity/operators", "state")
    _show_made(write_new(into, {"server.toml": server_settings(listen)}, folders))
    host = host or "HOST"
    _show_next(
        into,
        (
            f"protofed certs init --ca ca --server-name hub --host {host} --operator NAME",
            "a CA, the server's identity and yours, who command it; keep the folder ca off the network",
        ),
        ("protofed server doctor --settings server.toml", "what is still missing"),
        ("protofed server start --settings server.toml", ""),
    )


def _site_steps(site: str, *, certified: bool) -> Iterator[tuple[str, str]]:
    """Commands and what they are for, in the order of a new site's first day."""
    if not certified:
        request = f"protofed certs request --identity identity --site {site} --out {site}.request"
        yield request, "send it to the coordinator"
        yield f"protofed certs install {site}.bundle --identity identity", "what comes back"
    preview = f"your data as the run sees them, and what would be sent; read {POLICY}"
    yield f"protofed client check RECIPE --settings {SETTINGS} --preview", preview
    yield f"protofed client doctor --settings {SETTINGS}", "what is still missing"
    yield f"protofed client start --settings {SETTINGS}", ""


def _named(bundle: Path | None, site: str | None) -> str | None:
    """The site that a bundle names; without one, what was given."""
    if bundle is None:
        return site
    from protofed.common.pki.identity import Party
    from protofed.deploy.certs import files
    from protofed.deploy.certs.lifecycle import read_bundle

    certificate = read_bundle(files.read(bundle), str(bundle)).certificate
    if certificate.party is not Party.SITE or site not in (None, certificate.name):
        expected = "a site's" if site is None else f"that of site '{site}'"
        raise ConfigError(f"{bundle} has the {certificate}; expected {expected}")
    return certificate.name


def _ask(option: str, question: str, default: str | None = None) -> str:
    """The answer at a terminal; elsewhere the default, if there is one."""
    if sys.stdin.isatty():
        return str(typer.prompt(question, default))
    if default is None:
        raise ConfigError(f"{option} is missing, and there is no terminal to ask on; give {option}")
    return default


def _labels(pairs: Sequence[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        own, equals, of_run = pair.rpartition("=")
        if not (own and equals and of_run):
            raise ConfigError(f"--label {pair}: expected OWN=RUN, as --label Melanoma=mel")
        labels[own] = of_run
    return labels


def _show_made(paths: Sequence[Path]) -> None:
    for path in paths:
        say(f"{path}/" if path.is_dir() else path)


def _show_next(into: Path, *steps: tuple[str, str]) -> None:
    here = into.resolve() == Path.cwd()
    say("\nnext" + ("" if here else f", in {into}") + ":")
    for command, why in ((f"cd {into}", ""),) * (not here) + steps:
        say(f"  {command}" + (f"    # {why}" if why else ""))
