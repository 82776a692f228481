"""The parts of a report, and their rendering as one self-contained HTML page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import jinja2
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure as Drawing

from protofed.common.protocol.scores import is_share
from protofed.deploy.plots import STYLE, rendered
from protofed.deploy.run_view import score_text
from protofed.deploy.tables import Cell, Table

LABELS = {  # without the model's test set: a record does not have whether two sites were given the same images
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "pm_v": "accuracy on the classes that the site has, PM(V)",
    "pm_l": "accuracy by how common the classes are at the site, PM(L)",
    "local.balanced_accuracy": "balanced accuracy on the sites' own test sets",
    "local.accuracy": "accuracy on the sites' own test sets",
    "majority": "accuracy of always naming the test set's commonest class",
    "auroc": "area under the ROC curve",
    "local.auroc": "area under the ROC curve on the sites' own test sets",
    "ece": "calibration error (ECE; lower is better)",
    "local.ece": "calibration error on the sites' own test sets (lower is better)",
    "average_precision": "average precision, mean over the findings",
    "local.average_precision": "average precision on the sites' own test sets, mean over the findings",
    "sensitivity": "sensitivity at the run's least specificity, mean over the findings",
    "local.sensitivity": "sensitivity on the sites' own test sets, mean over the findings",
    "mae": "mean absolute error, in the numbers' own unit (lower is better)",
    "local.mae": "mean absolute error on the sites' own test sets, in the numbers' own unit (lower is better)",
    "bias": "mean of prediction minus truth, in the numbers' own unit (0 is none)",
    "agreement_low": "lower limit of agreement, in the numbers' own unit",
    "agreement_high": "upper limit of agreement, in the numbers' own unit",
    "local.bias": "mean of prediction minus truth on the sites' own test sets (0 is none)",
    "local.agreement_low": "lower limit of agreement on the sites' own test sets",
    "local.agreement_high": "upper limit of agreement on the sites' own test sets",
    "class_auroc": "area under the ROC curve",
    "class_average_precision": "average precision",
    "class_sensitivity": "sensitivity at the recipe's specificity",
    "brier": "Brier score (lower is better)",
    "local.brier": "Brier score on the sites' own test sets (lower is better)",
}
MANY_ROUNDS = 40  # rows of a table by round; of more rounds it shows some


def listed(names: Sequence[str], most: int = 12) -> str:
    """`a`, `a and b`, or `a, b and c`; of more than `most` names the first ones and how many more there are."""
    if len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def percent(share: float) -> str:
    """A share in percent with one decimal: 0.928 is 92.8 %."""
    return f"{100 * share:.1f} %"


def formatted(name: str, value: float) -> str:
    """A score's value: shares in percent, without the sign; calibration errors, losses and areas as they are."""
    return f"{100 * value:.1f}" if in_percent(name) else score_text(value, 3)


def in_percent(name: str) -> bool:
    """Whether a score's value is shown in percent; a share without a name is."""
    return not name or (is_share(name) and not name.endswith(("ece", "auroc")))


def shown(name: str, value: float) -> str:
    """`formatted` with the sign of a share in percent."""
    return f"{formatted(name, value)} %" if in_percent(name) else formatted(name, value)


def label(name: str) -> str:
    """A score's name in words, without the model (`global.`, `personal.`) that it is of."""
    score = name.partition(".")[2]
    return LABELS.get(score, score)


def utc(seconds: float | None) -> str:
    """A Unix time as `2026-01-31 12:00:00Z`."""
    return "–" if not seconds else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them: `90 s`, `3 min`, `2 h 5 min`, `3.2 days`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, odd_minutes = divmod(minutes, 60)
    return f"{minutes} min" if hours < 2 else f"{hours} h {odd_minutes} min" if hours < 48 else f"{hours / 24:.1f} days"


def megabytes(count: float) -> str:
    """Bytes in MB of 10^6 bytes, without the unit."""
    return f"{count / 1e6:.2f}" if count < 1e8 else f"{count / 1e6:,.0f}"


def thinned(numbers: Sequence[int], most: int = MANY_ROUNDS) -> list[int]:
    """At most `most` of the numbers, evenly spaced, the first and the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(index * (len(numbers) - 1) / (most - 1))] for index in range(most)]


TEMPLATES = Path(__file__).parent / "templates"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


@dataclass(frozen=True)
class Figure:
    """A drawing with its title, a description for those who cannot see it, and the numbers behind it."""

    title: str
    description: str
    drawing: Drawing
    numbers: Table | None = None


@dataclass(frozen=True)
class Section:
    """A section of a report, in the order of its attributes; in texts, `backticks` mark code.

    Attributes:
        key: the anchor in the page.
        notes: small print of the tables.
        missing: sentences on what is not shown, and how to get it.
    """

    key: str
    title: str
    lead: Sequence[str] = ()
    points: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def has_content(self) -> bool:
        """Whether it says more than what it lacks."""
        return any((self.lead, self.points, self.figures, self.tables, self.notes))


@dataclass(frozen=True)
class Tile:
    """A headline number; `note` is small print below it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Document:
    """A whole report; `glossary` has (word, meaning) pairs, `alerts` are read before anything else."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    foot: str
    alerts: Sequence[str] = ()
    glossary: Sequence[tuple[str, str]] = ()


def render(document: Document) -> str:
    """The page's HTML. Names and reasons that sites and operators wrote are escaped."""
    document = replace(document, sections=_without_empty(document.sections))
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))  # noqa: S704  (our own file)
    environment.filters["with_code"] = with_code
    # By id(): figures are not hashable, and each needs a prefix that no other has.
    figures = {id(figure): svg(figure, f"f{n}") for n, figure in enumerate(_figures(document), start=1)}
    return environment.get_template("report.html.j2").render(
        document=document,
        style=style,
        svg=lambda figure: figures[id(figure)],
        is_cell=lambda cell: isinstance(cell, Cell),
    )


def _without_empty(sections: Sequence[Section]) -> list[Section]:
    """The sections that say something; one more has why others do not, each reason once."""
    reasons: dict[str, list[str]] = {}
    for section in sections:
        for reason in () if section.has_content else section.missing:
            reasons.setdefault(reason, []).append(section.title)
    absent = [f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items()]
    filled = [section for section in sections if section.has_content]
    return [*filled, Section("absent", "Not in this report", points=absent)] if absent else filled


def with_code(text: str) -> Markup:
    """Text whose parts between backticks become <code>; everything is escaped."""
    form = ("{}", "<code>{}</code>")
    return Markup("").join(Markup(form[index % 2]).format(part) for index, part in enumerate(text.split("`")))  # noqa: S704


def svg(figure: Figure, prefix: str) -> Markup:
    """A drawing as an <svg> element with title and description, which scales with the page.

    Args:
        prefix: of all ids in it; different for each figure of the page.
    """
    root = ElementTree.fromstring(svg_file(figure))  # noqa: S314  (just written by ourselves)
    for element in root.iter():
        _localise(element, prefix)
    for metadata in root.findall("metadata"):
        root.remove(metadata)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    width = f"max-width: {figure.drawing.get_figwidth() * 7:.1f}rem"  # no larger than it was drawn for
    root.attrib |= {"role": "img", "aria-labelledby": f"{prefix}-title {prefix}-desc", "style": width}
    for index, (tag, text) in enumerate((("title", figure.title), ("desc", figure.description))):
        element = ElementTree.Element(tag, {"id": f"{prefix}-{tag}"})
        element.text = text
        root.insert(index, element)
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704  (escaped by the XML writer)


def svg_file(figure: Figure) -> str:
    """A drawing as the text of an SVG file, for an <img>, whose alternative text is the figure's description."""
    with rc_context(STYLE):  # `savefig` reads it again: drawing within it is not enough
        return rendered(figure.drawing, "svg").decode()


def _localise(element: ElementTree.Element, prefix: str) -> None:
    """Adapt an SVG element to HTML, where elements have no namespace and ids are unique in the page."""
    element.tag = element.tag.rpartition("}")[2]
    attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    if "id" in attributes:
        attributes["id"] = f"{prefix}-{attributes['id']}"
    if attributes.get("href", "").startswith("#"):
        attributes["href"] = f"#{prefix}-{attributes['href'][1:]}"
    element.attrib.clear()
    element.attrib |= {name: _REFERENCE.sub(rf"url(#{prefix}-\1)", value) for name, value in attributes.items()}
    if element.tag == "style" and element.text:
        element.text = ""  # matplotlib's style sheet (line joins and caps) would apply to the whole page


def _figures(document: Document) -> list[Figure]:
    return [figure for section in document.sections for figure in section.figures]
