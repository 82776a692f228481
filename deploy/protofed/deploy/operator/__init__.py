"""What an operator asks of a server over gRPC, and the live view of a run."""

from protofed.common.process import require_tls_1_3

require_tls_1_3()  # before a module of this package imports gRPC, for programs that are not the command line
