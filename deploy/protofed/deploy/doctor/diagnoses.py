"""The registry of diagnoses: each has a name, an exit code and a remedy.

Scripts depend on names and codes: neither ever changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protofed.common.errors import unknown
from protofed.deploy.tables import markdown_rows


@dataclass(frozen=True)
class Diagnosis:
    """One kind of finding.

    Attributes:
        code: the exit code if this is the first finding; 10 to 63 and 80 to 94, for 64 to 78 are codes of errors.
        warns: the daemon works all the same; a failure under `--strict` only.
    """

    name: str
    code: int
    remedy: str
    warns: bool = False


BOTH = (
    Diagnosis("settings-invalid", 10, "Correct the option, the variable or the key of the --settings file."),
    Diagnosis("connection-not-chosen", 11, "Give --identity FOLDER, or --plaintext for a try on one machine."),
    Diagnosis("library-missing", 12, "Install the wheel with [client] at a site, without an extra for a server."),
    Diagnosis("library-old", 13, "Install the wheel again, with -c constraints.txt of the clone or archive."),
    Diagnosis("clock-wrong", 14, "Set this machine's clock and keep it right (chrony, systemd-timesyncd)."),
    Diagnosis("identity-missing", 15, "protofed certs request, have it signed, then protofed certs install."),
    Diagnosis("identity-unreadable", 16, "Bring the file back, give it to the daemon's account, or install it again."),
    Diagnosis("identity-of-another", 17, "Give the --identity folder of this very site or server, or correct `site`."),
    Diagnosis("key-readable-by-others", 18, "chmod 600 key.pem; renew it if somebody may have read it."),
    Diagnosis("key-mismatch", 19, "Bring back the key that belongs to cert.pem, or protofed certs renew."),
    Diagnosis("certificate-of-another-authority", 20, "protofed certs install the bundle that the operator sent."),
    Diagnosis("authority-not-valid", 21, "Install a bundle of the new CA; if the dates look right, set the clock."),
    Diagnosis("certificate-expired", 22, "protofed certs renew, have it signed, then protofed certs install."),
    Diagnosis("certificate-not-yet-valid", 23, "Set this machine's clock, or wait until the certificate begins."),
    Diagnosis("certificate-ends-soon", 24, "protofed certs renew now; the daemon goes on meanwhile.", warns=True),
    Diagnosis("state-not-writable", 25, "Give the folder to the daemon's account, mount it writable, or move --state."),
    Diagnosis("disk-full", 26, "Free space, or move --state to a larger disk."),
    Diagnosis("disk-low", 27, "Free space before it runs out.", warns=True),
    Diagnosis("metrics-port-taken", 28, "Choose another port for metrics, or end what listens there."),
    Diagnosis("metrics-unusable", 29, "Correct `listen`, `identity` or `token` of the metrics."),
)
SERVER = (
    Diagnosis("recipe-invalid", 30, "Correct the recipe; protofed recipes list names examples."),
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
    Diagnosis(
        "policy-missing", 40, "Write one: protofed policies show standard > policy.toml; or name it so: standard."
    ),
    Diagnosis("policy-invalid", 41, "Correct the file; protofed policies show standard prints a valid one."),
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
    Diagnosis("data-unusable", 62, "Mount or copy the data there, or correct the table [data] and `partition_index`."),
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
    Diagnosis("partners-unconfirmed", 86, "Compare the list's code with all hospitals: client consortium confirm."),
    Diagnosis("sites-few", 87, "Register the other sites, or lower the keys of [federation] named.", warns=True),
)
NOISE = (
    Diagnosis("privacy-ledger-unusable", 88, "Do as it says: without the ledger no fit with noise begins."),
    Diagnosis(
        "privacy-budget-spent", 89, "Decide at the site: more epsilon in its policy, or no such runs.", warns=True
    ),
)
MET = (Diagnosis("partners-on-first-use", 91, "Confirm a list of partners: protofed consortium offer.", warns=True),)
NOTIFY = (
    Diagnosis("notify-unusable", 90, "Correct the table [notify]; then protofed server notify sends a test message."),
)
OWNER = (Diagnosis("state-of-another", 92, "Give each site a --state folder of its own, or correct `site`."),)
CHECK = (  # of `client check`, not of the doctor
    Diagnosis("scores-untrue", 93, "Correct what the verdict names after `but`: equal images, labels, one class."),
)
CALL = (Diagnosis("call-failed", 94, "Look at what it says of this machine (names, libraries), then at versions."),)
DIAGNOSES = {
    entry.name: entry
    for group in (BOTH, SERVER, CLIENT, (INTERNAL,), IMAGES, ROLES, RUN, SUMS, NOISE, NOTIFY, MET, OWNER, CHECK, CALL)
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


def table(entries: Iterable[Diagnosis] = tuple(DIAGNOSES.values())) -> str:
    """The table of the documentation, in Markdown."""
    rows = ([f"{each.code}", f"`{each.name}`{' (warning)' if each.warns else ''}", each.remedy] for each in entries)
    return markdown_rows(["code", "finding", "what to do"], *rows, right=[0])
