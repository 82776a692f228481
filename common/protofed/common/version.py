"""The version of this software, as installed."""

from importlib.metadata import version

VERSION = version("protofed")
