"""What survives a restart: ledger, blobs, unfinished uploads and their migrations."""
