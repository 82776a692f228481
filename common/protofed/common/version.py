"""The version of this software, as installed, and how it is installed with more."""

from importlib.metadata import version

VERSION = version("protofed")


def install_hint(*extras: str) -> str:
    """The command that adds extras: from the wheel's file or a clone, for no package index has protofed as its name.

    Args:
        extras: of pyproject.toml; none: the base install, which is the server's.
    """
    chosen = f"[{','.join(extras)}]" if extras else ""
    return f"pip install './protofed-{VERSION}-py3-none-any.whl{chosen}' where the wheel is, or '.{chosen}' in a clone"
