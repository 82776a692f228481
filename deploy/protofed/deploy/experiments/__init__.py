"""Comparisons of recipes over seeds: jobs, Ray, tables and curves."""
