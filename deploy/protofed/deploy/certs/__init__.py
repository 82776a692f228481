"""The certificates of a federation: its CA, requests, signing, installation and renewal."""
