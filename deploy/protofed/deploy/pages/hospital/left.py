"""What the site has sent: a sentence, a line a round, and on demand each item and the log's own state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.filesize import decimal
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.errors import count
from protofed.common.protocol.messages import TaskKind
from protofed.deploy.audit.reader import rounds_text
from protofed.deploy.pages.hospital.site import HospitalSite
from protofed.deploy.pages.hospital.site_log import Leaving, LeftTotals
from protofed.deploy.pages.pictures import Picture
from protofed.deploy.pages.shell import Page, find_shell, utc

SHOWN: Final = 25
NOTES_SHOWN: Final = 50


@dataclass(frozen=True)
class LeftPages:
    """The pages below `/left`."""

    site: HospitalSite

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [Route("/left", self.show), Route("/left/check", self.check, methods=["POST"])]

    def show(self, request: Request) -> Response:
        """The sentence, a page of the rounds, the newest first, and totals."""
        log = self.site.log.look()
        lines = round_lines(self.site.log.leavings())
        page = Page.of(request.query_params.get("page", ""), len(lines), SHOWN)
        totals = self.site.log.totals()
        context = {
            "log": log,
            "summary": summary(lines),
            "gaps": self.site.log.gaps(),
            "lines": page.cut(lines),
            "page": page,
            "totals": totals,
            "picture": self._picture(totals),
            "notes": self.site.log.notes()[:NOTES_SHOWN],
        }
        return find_shell(request).page(request, "left.html.j2", context)

    def _picture(self, totals: LeftTotals) -> Picture | None:
        from protofed.deploy.pages.hospital import figures  # with matplotlib, which takes a second

        parts = {key: size for key, (_, size) in totals.parts.items()}
        sketch = figures.by_run_sketch(parts)
        return None if sketch is None else self.site.pictures.of(("left", tuple(parts.items())), sketch)

    def check(self, request: Request) -> Response:
        """Read the log whole, and say whether it is what was written."""
        log = self.site.log.look(whole=True)
        if log.problem:
            find_shell(request).access.notify(f"the audit log is damaged: {log.problem}", error=True)
            return find_shell(request).done("/left")
        text = f"the log is good: records up to {log.last_number}, newest hash {log.newest}" if log.exists else "no log"
        return find_shell(request).done("/left", text)


FIRST_MODEL: Final = "first model"
UPDATE_ALONE: Final = "update alone"
UPDATE_AGGREGATED: Final = "update in a secure aggregation"
SCORES_ALONE: Final = "scores alone"
SCORES_AGGREGATED: Final = "scores in a secure aggregation"
NO_RESULT: Final = "keys and shares of a secure aggregation"
REFUSED: Final = "kept by the policy"
NOISE: Final = " with noise"
# What was uploaded in vain counts, too: it left. The first model has nothing of the site's data.
KINDS: Final = (UPDATE_ALONE, UPDATE_AGGREGATED, SCORES_ALONE, SCORES_AGGREGATED, NO_RESULT, FIRST_MODEL)
_ALONE: Final[Mapping[str, str]] = {
    TaskKind.FIT: UPDATE_ALONE,
    TaskKind.REFINE: UPDATE_ALONE,
    TaskKind.INITIALISE: FIRST_MODEL,
}
_BEGIN: Final[Mapping[str, str]] = {TaskKind.FIT: UPDATE_AGGREGATED, TaskKind.SCORE_SUM: SCORES_AGGREGATED}


@dataclass(frozen=True)
class RoundLine:
    """All that the site sent in one round of a run.

    Attributes:
        round: the first model counts to round 1, which begins with it.
        kinds: what was sent and how, of `KINDS`, and `REFUSED`.
        size: bytes of all its messages.
        items: the newest first.
    """

    run: str
    round: int
    kinds: Sequence[str]
    noisy: bool
    size: int
    items: Sequence[Leaving]

    @property
    def key(self) -> str:
        """Of its element in the page."""
        return f"{self.run}-{self.round}"

    @property
    def what(self) -> str:
        """What was sent, and how: alone, in a secure aggregation, with noise."""
        return ", ".join(kind + NOISE * (self.noisy and kind.startswith("update")) for kind in self.kinds)

    @property
    def records(self) -> str:
        """The numbers of its records in the audit log."""
        return number_records(self.items)


def round_lines(items: Iterable[Leaving]) -> list[RoundLine]:
    """A line for each round of each run, from items with the newest first."""
    rounds: dict[tuple[str, int], list[Leaving]] = {}
    for item in items:
        rounds.setdefault((item.run, max(1, item.round)), []).append(item)
    return [_line(run, number, of) for (run, number), of in rounds.items()]


def summary(lines: Sequence[RoundLine]) -> str:
    """One sentence: since when, how much, to whom, in how many rounds, and what; empty: nothing was sent."""
    items = [item for line in lines for item in line.items if not item.why]
    withheld = _held(lines)
    if not items:
        return f"This site has sent nothing, and {withheld}." if withheld else ""
    sent = [line for line in lines if set(line.kinds) != {REFUSED}]
    where = f"{count(len(sent), 'round')} of {count(len({line.run for line in sent}), 'run')}"
    since = utc(min(item.at for item in items))
    size = decimal(sum(item.size for item in items))
    tail = "".join(f"; {part}" for part in (_noise(sent), withheld) if part)
    return f"Since {since}, this site has sent {size} in {where} to {_servers(items)}: {_what(sent)}{tail}."


def _held(lines: Iterable[RoundLine]) -> str:
    withheld = sum(bool(item.why) for line in lines for item in line.items)
    return f"the policy kept back {count(withheld, 'item')}" if withheld else ""


def _servers(items: Iterable[Leaving]) -> str:
    servers = sorted({item.server for item in items if item.server})
    return " and ".join(servers) or "a server that the log does not name"


def _what(lines: Iterable[RoundLine]) -> str:
    kinds = Counter(kind for line in lines for kind in line.kinds)
    return ", ".join(_counted(kind, kinds[kind]) for kind in KINDS if kinds[kind])


def _noise(lines: Iterable[RoundLine]) -> str:
    noisy = sum(line.noisy for line in lines)
    return f"{count(noisy, 'round')} had noise" if noisy else ""


def number_records(items: Iterable[Leaving]) -> str:
    """The numbers of the records that items are made from, as `5 to 7, 9`."""
    return rounds_text({number for item in items for number in item.records})


def _counted(kind: str, number: int) -> str:
    if kind.startswith("scores"):
        return f"{kind} of {count(number, 'round')}"
    if kind == NO_RESULT:
        return f"{kind} without a result of {count(number, 'round')}"
    noun, _, how = kind.partition(" alone" if kind.endswith("alone") else " in ")
    return f"{count(number, noun)}{f' in {how}' if how else ' alone' * (kind == UPDATE_ALONE)}"


def _line(run: str, number: int, items: Sequence[Leaving]) -> RoundLine:
    kinds = set(_kinds(reversed(items)))
    ordered = [kind for kind in (*KINDS, REFUSED) if kind in kinds]
    size = sum(item.size for item in items)
    return RoundLine(run, number, ordered, any(item.noisy for item in items), size, items)


def _kinds(items: Iterable[Leaving]) -> Iterator[str]:
    """What items of a round are, the oldest first: a masked update or score belongs to the sum started last."""
    current, kinds = "", set[str]()
    for item in items:
        if item.why:
            yield REFUSED
        elif item.what == "scores":
            yield SCORES_ALONE
        elif not item.in_a_sum:
            yield _ALONE.get(item.what, UPDATE_ALONE)
        elif item.what in _BEGIN:
            current = _BEGIN[item.what]
        elif item.what == TaskKind.MASK:
            kinds.add(current or UPDATE_AGGREGATED)
    yield from kinds
    if current and not kinds:
        yield NO_RESULT
