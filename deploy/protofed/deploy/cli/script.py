"""The `protofed` script: it imports little itself, so that Ctrl-C ends it quietly while the commands are imported."""

from __future__ import annotations

import sys


def run() -> None:
    """Import the command line, then run it; always ends in SystemExit."""
    try:
        from protofed.common.process import quick_imports

        with quick_imports():
            from protofed.deploy.cli.main import main
    except KeyboardInterrupt:  # imports take a second; `main` itself answers what comes later
        sys.exit(130)
    main()
