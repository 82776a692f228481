"""The coordinator's pages, `protofed console`: what the commands of an operator show and do, by the same client."""
