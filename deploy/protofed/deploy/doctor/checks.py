"""The checks of `doctor`: what a check is, how checks are run, and the verdict. No daemon is started, no file left.

The diagnoses that a check ends in are registered here: each has a name, an exit code and a remedy. Scripts depend on
names and codes: neither ever changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from protofed.common.errors import ProtofedError, count, unknown
from protofed.common.pki.identity import IdentityError
from protofed.deploy.tables import LIST, Column, markdown_rows, terminal


@dataclass(frozen=True)
class Diagnosis:
    """One kind of finding.

    Attributes:
        code: the exit code if this is the first finding; 10 to 63 and 80 to 97, for 64 to 78 are codes of errors.
        warns: the daemon works all the same; a failure under `--strict` only.
    """

    name: str
    code: int
    remedy: str
    warns: bool = False


BOTH = (
    Diagnosis("settings-invalid", 10, "Correct the option, the variable or the key of the --settings file."),
    Diagnosis("connection-not-chosen", 11, "Give --identity FOLDER, or --identity none for a try on one machine."),
    Diagnosis("library-missing", 12, "Install the wheel with [client] at a site, without an extra for a server."),
    Diagnosis("library-old", 13, "Install the wheel again, with -c constraints.txt of the clone or archive."),
    Diagnosis("clock-wrong", 14, "Set this machine's clock and keep it right (chrony, systemd-timesyncd)."),
    Diagnosis("identity-missing", 15, "protofed certs request, have it signed, then protofed certs install."),
    Diagnosis("identity-unreadable", 16, "Bring the file back, give it to the daemon's account, or install it again."),
    Diagnosis("identity-of-another", 17, "Give the --identity folder of this very site or server, or correct `site`."),
    Diagnosis("key-readable-by-others", 18, "chmod 600 key.pem; renew it if somebody may have read it."),
    Diagnosis("key-mismatch", 19, "Bring back the key that belongs to cert.pem, or protofed certs request --renew."),
    Diagnosis("certificate-of-another-authority", 20, "protofed certs install the bundle that the operator sent."),
    Diagnosis("authority-not-valid", 21, "Install a bundle of the new CA; if the dates look right, set the clock."),
    Diagnosis(
        "certificate-expired", 22, "protofed certs request --renew, have it signed, then protofed certs install."
    ),
    Diagnosis("certificate-not-yet-valid", 23, "Set this machine's clock, or wait until the certificate begins."),
    Diagnosis(
        "certificate-ends-soon", 24, "protofed certs request --renew now; the daemon goes on meanwhile.", warns=True
    ),
    Diagnosis("state-not-writable", 25, "Give the folder to the daemon's account, mount it writable, or move --state."),
    Diagnosis("disk-full", 26, "Free space or inodes, but not in the state folder; or move --state to another disk."),
    Diagnosis("disk-low", 27, "Free space before it runs out.", warns=True),
    Diagnosis("metrics-port-taken", 28, "Choose another port for metrics, or end what listens there."),
    Diagnosis("metrics-unusable", 29, "Correct `listen`, `identity` or `token` of the metrics."),
)
SERVER = (
    Diagnosis("recipe-invalid", 30, "Correct the recipe; protofed recipes lists examples."),
    Diagnosis("operator-unusable", 31, "Put a valid operator's cert.pem into the folder operators/ of the identity."),
    Diagnosis("port-taken", 32, "End what listens there (ss -ltnp shows it), or choose another --listen."),
    Diagnosis("address-not-here", 33, "Listen on an address of this machine, as 0.0.0.0:7443, and a port over 1023."),
    Diagnosis("state-on-network", 34, "Keep --state on a local disk, or the ledger in PostgreSQL."),
    Diagnosis("ledger-unusable", 35, "Do as it says; else restore the state folder from a backup."),
    Diagnosis("memory-small", 36, "Raise the memory limit of the container or of `memory_limit_mb`.", warns=True),
    Diagnosis("descriptors-few", 37, "Raise `ulimit -n` (LimitNOFILE= of systemd).", warns=True),
    Diagnosis("database-unreachable", 38, "Start the database, or correct `ledger`: host, port, user, password."),
    Diagnosis("blobs-unusable", 39, "Mount the folder that `blobs` names, or make it, writable for the server."),
)
CLIENT = (
    Diagnosis("policy-missing", 40, "Write one: protofed policies standard > policy.toml; or name it so: standard."),
    Diagnosis("policy-invalid", 41, "Correct the file; protofed policies standard prints a valid one."),
    Diagnosis("name-unknown", 42, "Correct the name; `getent hosts NAME` shows whether this machine knows it."),
    Diagnosis("nothing-listens", 43, "Start it (`protofed server doctor` says what it lacks), or correct the port."),
    Diagnosis("no-answer", 44, "Have the firewall let this machine out to that port, or correct the address."),
    Diagnosis("proxy-away", 45, "Correct the setting `proxy`, or ask who runs it."),
    Diagnosis("proxy-password", 46, "Correct user and password in the setting `proxy`."),
    Diagnosis("proxy-refuses", 47, "Ask the proxy's owner to allow CONNECT to the server's port."),
    Diagnosis("not-tls", 48, "Correct the port, or start the server with --identity."),
    Diagnosis("old-tls", 49, "Bring what answers there up to TLS 1.3; no proxy may open the connection."),
    Diagnosis("server-authority", 50, "Correct the address, or install the bundle that the operator sent."),
    Diagnosis("server-name", 51, "Use a name that its certificate has, or have one made with this --host."),
    Diagnosis("server-dates", 52, "Have the operator renew the server's certificate, if this clock is right."),
    Diagnosis("certificate-refused", 53, "Ask the operator what the server's log says of this fingerprint."),
    Diagnosis("server-busy", 54, "Try again in a minute; then look into the server's log."),
    Diagnosis("certificate-not-registered", 55, "Have the operator register it: protofed certs register."),
    Diagnosis("certificate-revoked", 56, "That is for ever: ask the operator why, then request a new one."),
    Diagnosis("protocol-mismatch", 57, "Install the same protofed on both sides."),
    Diagnosis("version-differs", 58, "Both speak one protocol; bring the older one up to date.", warns=True),
    Diagnosis("device-absent", 59, "Choose a device that is there, --device auto or cpu, or install the driver."),
    Diagnosis("device-unusable", 60, "Look at nvidia-smi: another process, a fault, or a driver that is too old."),
    Diagnosis("shared-memory-small", 61, "docker run --shm-size=1g; only data loaders need it.", warns=True),
    Diagnosis(
        "data-unusable",
        62,
        "Mount or copy the data there, or correct the table [data] and `partition_index`.",
    ),
)
INTERNAL = Diagnosis("check-failed", 63, "Please report it, with what it says.")
IMAGES = (  # the codes from 64 to 78 are those of errors
    Diagnosis("labels-unmapped", 80, "Say in data.label_map what each is, or name it in data.ignore_labels."),
    Diagnosis("images-unreadable", 81, "Repair or remove the files, or allow for some: data.max_unreadable_fraction."),
    Diagnosis("preprocessing-differs", 82, "Ask the operator which run it is; then correct data.preprocessing_digest."),
)
# After the images: 55 and 56, its neighbours, are given away, and a code keeps its meaning.
ROLES = (
    Diagnosis("role-not-registered", 83, "Correct `roles`, or have the operator grant it: certs register --role."),
)
RUN = (
    Diagnosis(
        "run-refused", 84, "Agree with the coordinator on a recipe within your policy: client preview shows both."
    ),
)
SUMS = (
    Diagnosis("sum-identity-unusable", 85, "Bring the file back from the backup, mode 0600, of the daemon's account."),
    Diagnosis("partners-unconfirmed", 86, "Do as it says. Confirm a list only after all hospitals compared its code."),
    Diagnosis("sites-few", 87, "Register the other sites, or lower the keys of [federation] named.", warns=True),
)
NOISE = (
    Diagnosis("privacy-ledger-unusable", 88, "Do as it says: without the ledger no fit with noise begins."),
    Diagnosis(
        "privacy-budget-spent", 89, "Decide at the site: more epsilon in its policy, or no such runs.", warns=True
    ),
)
MET = (Diagnosis("partners-on-first-use", 91, "Confirm a list of partners: protofed consortium --offer.", warns=True),)
NOTIFY = (
    Diagnosis("notify-unusable", 90, "Correct the table [notify]; then server doctor --notify sends a test message."),
)
OWNER = (Diagnosis("state-of-another", 92, "Give each site a --state folder of its own, or correct `site`."),)
CHECK = (  # of `client check`, not of the doctor
    Diagnosis("scores-untrue", 93, "Correct what the verdict names after `but`: equal images, labels, one class."),
)
CALL = (Diagnosis("call-failed", 94, "Look at what it says of this machine (names, libraries), then at versions."),)
REFUSED = (
    Diagnosis("notify-refused", 95, "Do as the answer says: correct address, token, user or TLS of that channel."),
)
TODAY = (
    Diagnosis("daemon-silent", 96, "ps -o stat: T is stopped (kill -CONT), D waits for a disk. Else start it again."),
    Diagnosis("today-used-up", 97, "Raise that limit in the policy, or have the coordinator pause the run until then."),
)
DIAGNOSES = {
    entry.name: entry
    for group in (
        BOTH,
        SERVER,
        CLIENT,
        (INTERNAL,),
        IMAGES,
        ROLES,
        RUN,
        SUMS,
        NOISE,
        NOTIFY,
        MET,
        OWNER,
        CHECK,
        CALL,
        REFUSED,
        TODAY,
    )
    for entry in group
}


def diagnosis(name: str) -> Diagnosis:
    """The diagnosis of a name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in DIAGNOSES:
        raise unknown("diagnosis", name, DIAGNOSES)
    return DIAGNOSES[name]


def diagnoses_table(entries: Iterable[Diagnosis] = tuple(DIAGNOSES.values())) -> str:
    """The table of the documentation, in Markdown."""
    rows = ([f"{each.code}", f"`{each.name}`{' (warning)' if each.warns else ''}", each.remedy] for each in entries)
    return markdown_rows(["code", "finding", "what to do"], *rows, right=[0])


class State(StrEnum):
    """A check's result; the values stand in the JSON output."""

    FINE = "fine"
    WARNING = "warning"
    FINDING = "finding"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckRow:
    """One check's result.

    Attributes:
        message: what the check saw; of a skipped check, the reason.
        diagnosis: None unless the state is FINDING or WARNING.
    """

    check: str
    state: State
    message: str
    diagnosis: Diagnosis | None = None


class CheckFailedError(Exception):
    """A check found a problem.

    Args:
        name: of the diagnosis, as in `DIAGNOSES`.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class CheckSkippedError(Exception):
    """A check does not apply; the text is the reason."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        run: returns what it saw, in words; raises `CheckFailedError` or `CheckSkippedError`.
        otherwise: name of the diagnosis for a `ProtofedError` that `run` raises.
        needs: names of checks that must have passed before this one makes sense.
    """

    name: str
    run: Callable[[], str]
    otherwise: str = INTERNAL.name
    needs: tuple[str, ...] = ()


def run_checks(checks: Sequence[Check], begin: Callable[[str], None] = lambda _name: None) -> Iterator[CheckRow]:
    """Run all checks in order; a failed one skips those that need it and no other.

    Args:
        begin: called with each check's name before it runs.
    """
    unmet: set[str] = set()  # skipped checks too, so that what depends on them is skipped in turn
    for check in checks:
        begin(check.name)
        unmet_need = next((need for need in check.needs if need in unmet), None)
        row = _run_check(check) if unmet_need is None else CheckRow(check.name, State.SKIPPED, f"needs `{unmet_need}`")
        if row.state is State.FINDING or unmet_need is not None:
            unmet.add(check.name)
        yield row


def first_finding(rows: Sequence[CheckRow], *, strict: bool) -> Diagnosis | None:
    """The diagnosis whose code is the process's exit code; warnings count if `strict`. None: exit code 0."""
    counting = (State.FINDING, State.WARNING) if strict else (State.FINDING,)
    return next((row.diagnosis for row in rows if row.state in counting), None)


def verdict(rows: Sequence[CheckRow], *, strict: bool) -> str:
    """The last line of the output: how many findings and warnings, and the exit code."""
    findings, warnings, skipped = (
        [row for row in rows if row.state is state] for state in (State.FINDING, State.WARNING, State.SKIPPED)
    )
    worst = first_finding(rows, strict=strict)
    counts = [count(len(findings), "finding")] if findings else []
    counts += [count(len(warnings), "warning")] if warnings else []
    if worst is not None:
        which = "the first is " if len(findings) + len(warnings) > 1 else ""
        return f"{', '.join(counts)}; {which}{worst.name}: exit code {worst.code}"
    exceptions = f" but for {', '.join(counts)}" if counts else ""
    return f"all well{exceptions}: {count(len(rows) - len(skipped), 'check')}, {len(skipped)} did not apply"


def _run_check(check: Check) -> CheckRow:
    try:
        return CheckRow(check.name, State.FINE, check.run())
    except CheckSkippedError as skipped:
        return CheckRow(check.name, State.SKIPPED, str(skipped))
    except CheckFailedError as failed:
        return _row(check, failed.name, str(failed))
    except IdentityError as error:  # a ProtofedError: it must be caught first, for it names its own diagnosis
        return _row(check, error.problem, str(error))
    except ProtofedError as error:
        return _row(check, check.otherwise, str(error))
    except Exception as error:  # an unforeseen error in one check must not hide the findings of the others
        return _row(check, INTERNAL.name, f"{type(error).__name__}: {error}")


def _row(check: Check, name: str, message: str) -> CheckRow:
    known_diagnosis = diagnosis(name)
    return CheckRow(check.name, State.WARNING if known_diagnosis.warns else State.FINDING, message, known_diagnosis)


MARKS = {State.FINE: "✓", State.WARNING: "!", State.FINDING: "✗", State.SKIPPED: "–"}
STYLES = {State.FINE: "green", State.WARNING: "yellow", State.FINDING: "bold red", State.SKIPPED: "dim"}


def table(rows: Sequence[CheckRow]) -> RenderableType:
    """One row a check: mark, name, message; a finding also has its diagnosis and the remedy."""
    mark = Column[CheckRow]("", lambda row: Text(MARKS[row.state], style=STYLES[row.state]))
    return terminal((mark, Column("", lambda row: row.check), Column("", _message, wraps=True)), rows, LIST)


def plain(rows: Sequence[CheckRow], *, strict: bool) -> dict[str, Any]:
    """The output of `--json`: `verdict`, `exit_code` and `checks`."""
    worst = first_finding(rows, strict=strict)
    return {
        "verdict": verdict(rows, strict=strict),
        "exit_code": 0 if worst is None else worst.code,
        "checks": [_plain(row) for row in rows],
    }


def _message(row: CheckRow) -> Text:
    # `Text`, not markup: messages contain paths and library errors, in which rich would read [x] as a style.
    if row.diagnosis is None:
        return Text(row.message, style="dim" if row.state is State.SKIPPED else "")
    text = Text.assemble((row.diagnosis.name, STYLES[row.state]), f": {row.message}")
    return text.append(f"\n→ {row.diagnosis.remedy}", style="bold")


def _plain(row: CheckRow) -> dict[str, Any]:
    fields: dict[str, Any] = {"check": row.check, "state": row.state.value, "seen": row.message}
    if row.diagnosis is not None:
        fields |= {"finding": row.diagnosis.name, "code": row.diagnosis.code, "remedy": row.diagnosis.remedy}
    return fields
