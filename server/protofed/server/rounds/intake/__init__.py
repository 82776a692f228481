"""What the sites of a run ask and send, judged; what counts becomes an event of the run."""
