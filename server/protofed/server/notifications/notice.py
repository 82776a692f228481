"""One message: what happened, to which run or site, what to do; as JSON and as an e-mail.

Nothing in it is of anybody's data: it has names of runs, sites and parties, times, codes, and numbers of rounds and
sites. What operators and sites write freely, such as the reason of an abort, is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Any, Final

from protofed.common.clock import parse_stamp
from protofed.common.storage.journal import Fact

VERSION: Final = 1  # of the JSON: raised when a key changes its meaning or goes; a new key is no new version
TEST: Final = "test"  # the event of a message that was only asked for


@dataclass(frozen=True)
class Notice:
    """One message; its fields are the keys of the JSON, with `version` before them.

    Attributes:
        id: of this message; an attempt to send it again has the same one.
        event: one of `NotifyEvent`, or `TEST`.
        severity: critical (somebody should look now), warning (today) or info.
        at: when it was noticed; UTC in RFC 3339.
        server: its certificate's name, or its address in plain text.
        run, site: whom it is about; None: neither.
        title: in a line; `text`: what happened; `todo`: what to do.
        facts: more, by event; the reference lists them.
        runbook: the section of the documents that says what to do, in more words; empty: nothing is to be done.
    """

    id: str
    event: str
    severity: str
    at: str
    server: str
    run: str | None
    site: str | None
    title: str
    text: str
    todo: str
    facts: Mapping[str, Fact]
    runbook: str

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Notice:
        """What `table` has made.

        Raises:
            TypeError: it is not one of this version's.
        """
        return cls(**table)

    def table(self) -> dict[str, Fact]:
        """All fields, for the journal."""
        return {**vars(self), "facts": dict(self.facts)}

    def body(self) -> bytes:
        """The JSON of a webhook, in UTF-8."""
        return json.dumps({"version": VERSION, **self.table()}, ensure_ascii=False, sort_keys=True).encode()

    def email(self, sender: str, to: tuple[str, ...]) -> EmailMessage:
        """The message as text/plain; mail servers know a repetition by its Message-ID."""
        message = EmailMessage()
        message["From"], message["To"] = sender, ", ".join(to)
        message["Subject"] = f"[protofed {self.server}] {self.title}"
        message["Date"] = format_datetime(parse_stamp(self.at))
        message["Message-ID"] = f"<{self.id}@{sender.rpartition('@')[2]}>"
        message["Auto-Submitted"] = "auto-generated"  # RFC 3834: no answer by a machine
        rows = {"event": self.event, "server": self.server, "run": self.run, "site": self.site, "at": self.at}
        listed = "\n".join(f"{name:<8}{value}" for name, value in rows.items() if value is not None)
        more = f"\nMore: {self.runbook}" if self.runbook else ""
        message.set_content(f"{self.text}\n\nWhat to do: {self.todo}{more}\n\n{listed}\n")
        return message
