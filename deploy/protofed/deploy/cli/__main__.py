"""`python -m protofed.deploy.cli`: the command line where the `protofed` script is not on the path."""

from protofed.deploy.cli.script import run

run()
