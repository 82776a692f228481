"""What an operator asks of a server over gRPC, and the live view of a run."""
