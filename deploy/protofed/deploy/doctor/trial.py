"""The doctor's trial of a run: the daemon's own preparation, and what it would decline each round for as a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protofed.client.data.file_entry import TooManyUnreadableError
from protofed.client.data.labels import LabelsError
from protofed.client.data.sources import infer_class_names, infer_input
from protofed.client.policy.run_limits import BY_IMAGES
from protofed.client.policy.update_checks import PolicyRefusedError
from protofed.client.site import PreprocessingError
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError, DataError, TaskFailedError, short
from protofed.common.protocol.messages import Assignment
from protofed.deploy.daemons import client
from protofed.deploy.doctor.checks import CheckFailedError

if TYPE_CHECKING:
    from protofed.client.data.site_data import SiteData

NAMED = 3  # unreadable files that the message names
# The first that an error is an instance of; of others, the check itself has failed.
_DIAGNOSES: dict[type[Exception], str] = {
    LabelsError: "labels-unmapped",
    TooManyUnreadableError: "images-unreadable",
    DataError: "data-unusable",
    PreprocessingError: "preprocessing-differs",
    PolicyRefusedError: "run-refused",
    ConfigError: "recipe-invalid",
}


def prepare(settings: ClientSettings, run: Assignment) -> SiteData:
    """The data as the daemon loads them for a run, which it would take part in.

    Raises:
        CheckFailedError: the daemon would decline each round, by the code in the text; or let no sum be read.
        ConfigError, DataError, PolicyViolationError: it would not start.
    """
    try:
        prepared = client.try_run(settings, run)
        if (refusal := prepared.withheld) is not None:
            text = f"in run {run.run} nothing that this site trains leaves, and no sum with it opens: {_text(refusal)}"
            raise CheckFailedError(_diagnosis(refusal), text)
        return prepared.data
    except TaskFailedError as failure:
        cause = failure.__cause__ or failure
        text = f"the daemon declines each round of {run.run} ({failure.reason}): {_text(cause)}"
        raise CheckFailedError(_diagnosis(cause), text) from failure


def load(settings: ClientSettings) -> SiteData:
    """The data with their own shape and classes, where there is no run to prepare.

    Raises:
        CheckFailedError: the daemon could not load them for any run.
    """
    try:
        input_, classes = infer_input(settings.data)
        return client.load_data(settings, input_, classes, infer_class_names(settings.data))
    except DataError as error:
        raise CheckFailedError(_diagnosis(error), _text(error)) from error


def _diagnosis(cause: BaseException) -> str:
    return next((name for kind, name in _DIAGNOSES.items() if isinstance(cause, kind)), "check-failed")


def _text(cause: BaseException) -> str:
    """The daemon's text, without its counts of examples: what the doctor says is sent to others."""
    match cause:
        case TooManyUnreadableError(files=files):
            listed = ", ".join(f"{short(name)}: {why}" for name, why in files[:NAMED])
            return f"{listed}{'; and others' if len(files) > NAMED else ''} (`protofed client check` lists all)"
        case PolicyRefusedError(rule=rule) if rule in BY_IMAGES:
            return f"with this site's images the run breaks {rule} of its policy; the daemon's log says by how much"
    return str(cause)
