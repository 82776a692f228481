"""What the author of a dataset or of a partition gets from `protofed`; see the guide to plug-ins."""

from protofed.client.data.datasets import read_dataset
from protofed.client.data.examples import Examples
from protofed.client.data.split import DataSplit
from protofed.common.config.data import Data
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

__all__ = ["Data", "DataError", "DataSplit", "Examples", "Input", "read_dataset"]
