"""Pages in a browser: a shell on loopback that `protofed console` and the hospital's page share, and the pages."""
