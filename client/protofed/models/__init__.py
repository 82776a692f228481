"""What the author of a model gets from `protofed`; see the guide to plug-ins."""

from protofed.client.models.split import SplitModel
from protofed.common.config.tables import Input
from protofed.common.errors import ConfigError

__all__ = ["ConfigError", "Input", "SplitModel"]
