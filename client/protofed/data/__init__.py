"""What the author of a dataset or of a partition gets from `protofed`; see the guide to plug-ins."""

from protofed.client.data.examples import Examples
from protofed.client.data.split import DataSplit
from protofed.common.config.data import Data
from protofed.common.errors import DataError

__all__ = ["Data", "DataError", "DataSplit", "Examples"]
