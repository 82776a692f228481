"""MODEL_CARD.md: describe an exported model for readers without the run at hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from protofed.client.data.volumes import gives_several
from protofed.common.config.tables import EveryFrame, Frames, Input, NamedTransform
from protofed.common.config.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, output_noun
from protofed.common.errors import count, plural
from protofed.common.protocol.messages import QUALIFIED, score_family
from protofed.common.protocol.scores import MAJORITY, lower_is_better, name_ends
from protofed.deploy.export.images import MODES
from protofed.deploy.export.model_folder import FACTS, GRAPH, WEIGHTS, ModelFacts
from protofed.deploy.run_view import ABOUT_INTERVALS, MAX_SITES, RunView, score_text
from protofed.deploy.tables import markdown_rows, printable
from protofed.server.method import server_methods

Choice: TypeAlias = Literal["newest", "given", "best"]

HEADS = {
    "own": "`outputs` come from a linear layer.",
    "cosine": "`outputs` are scaled cosines between the image's features and one prototype per class.",
    "nearest": "`outputs` are the negative distances between the image's features and one prototype per class. A class "
    "without a prototype has minus infinity, and probability 0.",
}
COLOURS = {1: "grey", 3: "RGB"}
FRAMES: Mapping[str, str] = {
    "one": "A file of several frames is refused.",
    "middle": "Of several frames, the one in the middle is the image. Of an even number, it is the later one.",
    "max": "Of several frames, their maximum is the image.",
    "mean": "Of several frames, their mean is the image. Grey frames go through step 4 first.",
    "all": "Each frame is an image.",
}
FITS = {
    "exact": "The run took images of {size} pixels only.",
    "stretch": "Other sizes are stretched to {size} pixels.",
    "crop": "Other sizes are scaled to cover {size} pixels, and the middle is taken.",
    "pad": "Other sizes are scaled into {size} pixels, with black beside.",
}
BASELINES = {MAJORITY: "accuracy of always naming the test set's commonest class"}  # no scores of the model
BALANCED = "balanced_accuracy"
_UNCALIBRATED = "Probabilities were not calibrated; a large one is not a promise."


@dataclass(frozen=True)
class Words:
    """What a card says of a task.

    Attributes:
        kind: what the model is.
        limits: sentences that hold for every such model.
    """

    kind: str
    limits: tuple[str, ...] = ()


WORDS = {
    CLASSIFICATION: Words(
        "An image classifier",
        (
            "It always answers with one of its classes, also for an image of none of them.",
            _UNCALIBRATED,
            "Rare classes may be recognised far worse than the mean score says.",
        ),
    ),
    MULTI_LABEL: Words(
        "A model that predicts findings in images",
        (
            "It knows no other findings than these.",
            _UNCALIBRATED,
            "Rare findings may be recognised far worse than the mean score says.",
        ),
    ),
    REGRESSION: Words(
        "A model that predicts a number for each image",
        limits=("It always answers with a number in its range, also for an image that has no such number.",),
    ),
}
SHOWN_CLASSES = 100  # rows of the table; the rest is in model.json
MAX_LEFT = 12  # sites that a card names


def card(
    facts: ModelFacts,
    files: Iterable[str],
    difference: float | None,
    run: RunView | None = None,
    chosen: Choice = "newest",
) -> str:
    """The text of the card, as Markdown.

    Args:
        files: the weight files in the folder.
        difference: largest absolute difference of predictions between ONNX Runtime and PyTorch; None without ONNX.
        run: None: the model was made from a site's own folder, without the server.
        chosen: how the model's round was chosen.
    """
    first = [f"# {_title(facts)}", *_alerts(facts, run), _description(facts, run, chosen)]
    sections = (
        *first,
        f"## Input and output\n\n{_input(facts)}\n\n{_output(facts)}",
        f"## From an image file to `pixels`\n\n{_preprocessing(facts.model.input)}",
        f"## {_sentence(_outputs(facts))}\n\n{_names(facts)}",
        f"## Scores\n\n{_scores(facts)}",
        f"## Provenance\n\n{_provenance(facts)}",
        f"## Intended use\n\n{_use(facts)}",
        f"## Limits\n\n{_limits(facts)}",
        f"## Files and use\n\n{_files(facts, set(files), difference)}",
    )
    return "\n\n".join(sections) + "\n"


def _title(facts: ModelFacts) -> str:
    origin = facts.origin
    kinds = {"global": "global model", "personal": f"personal model of site {origin.site}"}
    return f"{kinds.get(origin.kind, f'model of class {origin.kind[6:]}')} of run {origin.run}, round {origin.round}"


def _alerts(facts: ModelFacts, run: RunView | None) -> list[str]:
    """What a reader must know before anything else, as a quotation each."""
    if run is None:
        return []
    alerts, origin, status = [], facts.origin, run.run["status"]
    if status in ("failed", "aborted"):
        what = "failed" if status == "failed" else "was aborted"
        hand = f" by operator '{run.aborted_by}'" if run.aborted_by and status == "aborted" else ""
        reason = f": {run.reason}" if run.reason else ""
        alerts.append(f"The run {what}{hand} on {_date(run.run['ended_at'])}{reason.removesuffix('.')}.")
    for number, text in warnings(run):
        other = "" if number == origin.round else f" (Said of round {number}, this model is of round {origin.round}.)"
        alerts.append(f"{text}{other}")
    return [f"> **Warning.** {_line(text)}" for text in alerts]


def warnings(run: RunView) -> list[tuple[int, str]]:
    """Signs of a useless model, each with its round.

    All signs for the global model, and the first few for sites' own models: hundreds of sites may have one each.
    """
    own = [one for one in run.warnings if one["site"]]
    chosen = [one for one in run.warnings if not one["site"]] + own[:MAX_SITES]
    rows = [(one["round"], one["text"]) for one in chosen]
    more = own[MAX_SITES:]
    text = f"{count(len(more), 'more warning')} of sites' own models: `protofed report --json` has them."
    return rows + ([(more[0]["round"], text)] if more else [])


def _description(facts: ModelFacts, run: RunView | None, chosen: Choice) -> str:
    origin, spec = facts.origin, facts.model
    trained = server_methods.about(origin.method.name).cited
    size = f", {len(spec.classes)} {_outputs(facts)}" if len(spec.classes) > 1 else ""
    text = f"{_words(facts).kind} ({spec.architecture.name}{size}), trained with {trained}"
    if origin.kind == "personal":
        return f"{text} for site {origin.site}: it is fitted to that site's images."
    if run is not None:
        sites = len(run.contributors_until(origin.round))
        text += (
            f" from the updates of {sites} site{'' if sites == 1 else 's'}" if sites else "; no site's update is in it"
        )
    rounds = "" if run is None else _rounds(origin.round, run, chosen)
    if origin.kind == "global":
        return f"{text}. {rounds}".rstrip()
    name = spec.classes[int(origin.kind[6:])]
    return f"{text}; it leans on the sites that have much of class '{name}'. {rounds}".rstrip()


def _rounds(number: int, run: RunView, chosen: Choice) -> str:
    so_far = "" if run.run["ended_at"] else ", and the run has not ended"
    of_rounds = f"{run.done} of {run.planned} planned rounds are finished{so_far}"
    if run.run["status"] == "completed" and run.reason:
        of_rounds += f" ({_line(run.reason)})"
    departures = f" Excluded or revoked: {'; '.join(map(_line, departed))}." if (departed := _left(run)) else ""
    return f"It is the model after round {number}; {of_rounds}. {choice(run, number, chosen)}{departures}"


def _left(run: RunView) -> list[str]:
    """What became of sites that were excluded or had their certificates revoked, a sentence each, the first ones."""
    what = {"excluded": "excluded", "revoked": "certificate revoked"}
    sentences = [
        f"{one['site']} ({what[one['action']]}{_during(one['round'])}{': ' * bool(one['reason'])}{one['reason']})"
        for one in run.interventions
        if one["action"] in what
    ]
    more = sentences[MAX_LEFT:]
    return sentences[:MAX_LEFT] + ([f"{len(more):,} more, which `protofed report` has"] if more else [])


def _during(number: int | None) -> str:
    return "" if number is None else f", round {number}"  # None: before the first round was opened


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def choice(run: RunView, number: int, chosen: Choice) -> str:
    """Why it is the model of this round, with the score that judges the run's rounds beside that of the newest one."""
    best = run.best
    values = {} if best is None else run.means(best.score)
    how = {"newest": "It is the newest model that was kept", "given": "Its round was chosen by its number"}
    if best is None or best.round not in values:
        reason = how.get(chosen, "It is the best round")
        untrained = "" if number else " Round 0 is before the run's first training."
        return f"{reason}; no score judges the run's rounds.{untrained}"
    newest, its_value = max(values), score_text(best.value)
    last = f"the newest scored round, {newest}, has {score_text(values[newest])}"
    last = last if newest != best.round else "it is the newest"
    if chosen == "best":
        return (
            f"It was chosen as the best round by {best.score}: {its_value}; {last}. Chosen by this score, it is "
            "optimistic in it: score it on images that had no part in the choice."
        )
    here = score_text(values[number]) if number in values else "not taken"
    lower = lower_is_better(best.score)
    if number in values and (values[number] <= best.value if lower else values[number] >= best.value):
        return f"{how[chosen]}: {best.score} {here}, and no scored round has {'less' if lower else 'more'}."
    return f"{how[chosen]}: {best.score} {here}; the best round, {best.round}, has {its_value}."


def _input(facts: ModelFacts) -> str:
    channels, height, width = facts.model.input.shape
    return (
        f"`pixels`: float32 [N, {channels}, {height}, {width}] (images, channels, height, width), values 0 to 1; N is "
        f"any number. The run's normalisation (mean {_values(facts.model.input.mean)}, standard deviation "
        f"{_values(facts.model.input.std)}) is part of the model: do not normalise. Outputs are float32 "
        f"[N, {len(facts.model.classes)}]."
    )


def _values(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _output(facts: ModelFacts) -> str:
    head = HEADS.get(facts.model.head, f"`outputs` come from a head of the method's own, `{facts.model.head}`.")
    best = " The predicted class is the one with the largest." if facts.model.task.name == CLASSIFICATION else ""
    return f"{head} `predictions` come from them: {_line(facts.model.predictions)}.{best}"


def _outputs(facts: ModelFacts) -> str:
    return plural(output_noun(facts.model.task.name))


def _words(facts: ModelFacts) -> Words:
    return WORDS.get(facts.model.task.name, Words(f"A model for the task {_line(facts.model.task.name)}"))


def _names(facts: ModelFacts) -> str:
    names = facts.model.classes
    rows = markdown_rows(["index", "name"], *([f"{i}", _cell(name)] for i, name in enumerate(names[:SHOWN_CLASSES])))
    more = f"\n\n{len(names) - SHOWN_CLASSES} more are in {FACTS}." if len(names) > SHOWN_CLASSES else ""
    return f"{rows}{more}"


def _scores(facts: ModelFacts) -> str:
    values = {name: value for name, value in facts.scores.values.items() if score_family(name) == name}
    if not values:
        return f"None are at hand: {facts.scores.of}."
    # Balanced accuracy first: where one class is common, accuracy looks good of a model that has learnt nothing.
    order = sorted(values, key=lambda name: (not name.endswith(BALANCED), name))
    rows = [[name, f"{score_text(values[name])}{_interval(facts, name)}"] for name in order if name not in BASELINES]
    rows += [[label, f"{values[name]:.4f}"] for name, label in BASELINES.items() if name in values]
    # What classes the sites' own test sets have, a card of the global model does not know.
    known = [name for name in order if name.endswith(BALANCED) and not name.startswith("global.local.")]
    rows += [[f"{name} by chance", f"{_chance(facts, name):.4f}"] for name in known]
    intervals = f" {ABOUT_INTERVALS}" if any(_interval(facts, name) for name in values) else ""
    return f"{_sentence(facts.scores.of)}.{intervals}\n\n{markdown_rows(['score', 'value'], *rows)}"


def _interval(facts: ModelFacts, name: str) -> str:
    """Such as ` (0.81 to 0.93)`; empty if the score has no interval."""
    ends = [facts.scores.values.get(f"{name}{QUALIFIED}{end}") for end in name_ends()]
    low, high = ends
    return "" if low is None or high is None else f" ({score_text(low)} to {score_text(high)})"


def _chance(facts: ModelFacts, balanced: str) -> float:
    """The balanced accuracy of guessing: 1 / the number of classes in the test set. Each of them has a recall.

    If recalls are not known, 1 / the number of all classes, which makes chance no larger.
    """
    stem = f"{balanced.removesuffix(BALANCED)}recall."
    return 1 / (sum(name.startswith(stem) for name in facts.scores.values) or len(facts.model.classes))


def _provenance(facts: ModelFacts) -> str:
    origin = facts.origin
    options = ", ".join(f"{key} = {value}" for key, value in origin.method.options.items()) or "defaults"
    rows = {
        "run": origin.run,
        "round": origin.round,
        "method": f"{origin.method.name} ({options})",
        "recipe (fingerprint)": origin.recipe,
        "made from (BLAKE3 of the state)": origin.state or "the site's own training alone",
        "weights (BLAKE3)": origin.weights,
        "exported by": f"protofed {origin.protofed}",
        "exported at": origin.at,
    }
    return markdown_rows(["", ""], *([key, _cell(str(value))] for key, value in rows.items()))


def _use(facts: ModelFacts) -> str:
    channels, height, width = facts.model.input.shape
    return (
        "Research, and comparison of methods, on images that were taken and prepared like the run's images. Input: "
        f"{width} x {height} pixels, {channels} channel{'s' if channels > 1 else ''}. "
        "It is not a medical device and was not examined as one. Base no diagnosis and no treatment on it."
    )


def _preprocessing(input_: Input) -> str:
    """What the run's sites did with a file, in the order of `client.data.decoding`."""
    steps = [
        f"{_frames(input_.frames)} A file of one frame is one image. Slices and pages count as frames.",
        "The image is turned as its EXIF orientation says.",
        _colours(input_),
        _levels(input_),
        *(f"The transform {_transform(step)} is applied." for step in input_.prepare),
        FITS[input_.fit].format(size=f"{input_.shape[2]} x {input_.shape[1]}"),
    ]
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    strict = [name for name in ("fit", "colours") if getattr(input_, name) == "exact"]
    loose = " It also stretches other sizes, and converts between grey and RGB." if strict else ""
    several = (
        " Predictions and scores are of single frames: the run has no rule that combines those of a file."
        if gives_several(input_.frames)
        else ""
    )
    return (
        f"The run's sites did this, in this order:\n\n{numbered}\n\n`protofed predict` does the same.{loose}{several}"
    )


def _frames(rule: Frames) -> str:
    if isinstance(rule, EveryFrame):
        step = rule.every
        return f"Of several frames, the frames 1, {1 + step}, {1 + 2 * step} and so on are images."
    return FRAMES[rule]


def _colours(input_: Input) -> str:
    channels = input_.shape[0]
    if input_.colours == "convert" and channels in COLOURS:
        return "Grey is repeated for RGB." if channels == 3 else "RGB becomes grey, by ITU-R 601."
    kind = COLOURS.get(channels)
    return f"The run took images of {channels} channels only." if kind is None else f"The run took {kind} images only."


def _levels(input_: Input) -> str:
    if input_.window is None:
        return (
            "Values become 0 to 1: white is the largest value that the file's bits can hold. A DICOM file's own "
            "VOI LUT or first window applies."
        )
    centre, width = input_.window
    low, high = centre - width / 2, centre + width / 2
    return f"Values of {low:g} to {high:g}, in the file's own units, become 0 to 1."


def _transform(step: NamedTransform) -> str:
    options = ", ".join(f"{name} = {json.dumps(value)}" for name, value in step.options.items())
    return _line(step.transform) + (f" ({_line(options)})" if options else "")


def _limits(facts: ModelFacts) -> str:
    points = [
        *_words(facts).limits,
        "Scores hold for the test set that they were taken on, not for another scanner, clinic or population.",
    ]
    if facts.origin.kind == "personal":
        points.append("It was fitted to one site, and its weights may tell of that site's data: decide who gets it.")
    elif facts.origin.kind != "global":
        title = server_methods.about(facts.origin.method.name).title
        points.append(f"It is one ingredient of the mixtures of {title}, not a detector of its class.")
    return "\n".join(f"- {point}" for point in points)


def _files(facts: ModelFacts, files: set[str], difference: float | None) -> str:
    lines = [f"- `{FACTS}`: these facts for programs, and the BLAKE3 of each file with weights."]
    if WEIGHTS in files:
        lines.append(f"- `{WEIGHTS}`: weights by name (`body.…`, `head.…`), with these facts as metadata.")
    if GRAPH in files:
        notes = "" if difference is None else f" Its predictions differ from PyTorch's by at most {difference:.1e}."
        lines.append(f"- `{GRAPH}`: the whole model for ONNX Runtime and others.{notes}")
    lines += ["", "```sh", "protofed predict THIS_FOLDER IMAGES --out predictions.csv", "```"]
    return "\n".join(lines + (["", "```python", _snippet(facts), "```"] if GRAPH in files else []))


def _snippet(facts: ModelFacts) -> str:
    channels, height, width = facts.model.input.shape
    mode = MODES.get(channels)
    if mode is None:
        load = f"pixels = np.zeros((1, {channels}, {height}, {width}), np.float32)  # your images, 0 to 1"
        imports = "import numpy as np\nimport onnxruntime"
    else:
        input_ = facts.model.input
        as_it_is = input_.fit in ("exact", "stretch") and input_.window is None and not input_.prepare
        resize = f"image = image.resize(({width}, {height}), Image.Resampling.BILINEAR)"
        order = "[None, None]" if channels == 1 else ".transpose(2, 0, 1)[None]"
        load = (
            f'image = Image.open("image.png").convert("{mode}")\n'
            f"{resize if as_it_is else f'# of {width} x {height} pixels, prepared as above'}\n"
            f"pixels = (np.asarray(image, np.float32) / 255){order}"
        )
        imports = "import numpy as np\nimport onnxruntime\nfrom PIL import Image"
    session = f'model = onnxruntime.InferenceSession("{GRAPH}")'
    best = ".argmax()" if facts.model.task.name == CLASSIFICATION else ""
    run_model = f'(predictions,) = model.run(["predictions"], {{"pixels": pixels}})\nprint(predictions[0]{best})'
    return f"{imports}\n\n{session}\n{load}\n{run_model}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _line(text: str) -> str:
    """One line of Markdown, in which what sites and operators wrote is text."""
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", printable(text))


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")
