"""What operators ask of the server and what it answers: runs, records, downloads."""
