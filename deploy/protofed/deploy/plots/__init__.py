"""Pictures: their style and saving, and the charts that reports, comparisons and pages share."""
