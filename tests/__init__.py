"""The tests; whatever of them imports gRPC, this comes first."""

import tests.checkout  # noqa: F401  (imports of protofed work from here on, installed or not)
from protofed.common.process import require_tls_1_3

require_tls_1_3()
