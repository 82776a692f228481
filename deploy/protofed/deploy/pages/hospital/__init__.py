"""The hospital's pages."""
