"""Whose state folder it is: a site's name in a file, so that no other site takes the folder, its log and its keys."""

from __future__ import annotations

from pathlib import Path

from protofed.common.errors import ConfigError, StateError, short
from protofed.common.payload import SiteId
from protofed.common.storage import files

FILE = ".site"  # in the state folder; run names cannot begin with a dot


def check_owner(folder: Path, site: SiteId) -> bool:
    """Whether the folder is known to be the site's; False: it is nobody's yet.

    Raises:
        ConfigError: it is another site's.
        StateError: the file cannot be read.
    """
    path = folder / FILE
    try:
        owner = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(
            f"{path} cannot be read ({error}); restore it from the backup of this site's folder"
        ) from error
    if owner != site:
        raise ConfigError(
            f"the state folder {folder} belongs to site '{short(owner)}', and this is site '{site}'. Expected one "
            f"site in each audit log. Give '{site}' its own --state folder, or correct `site`"
        )
    return True


def claim(folder: Path, site: SiteId) -> None:
    """Make a folder that is nobody's the site's, durably; the caller has the folder's lock.

    Raises:
        ConfigError, StateError: as of `check_owner`; or it cannot be written.
    """
    if not check_owner(folder, site):
        files.write(folder / FILE, f"{site}\n".encode())
