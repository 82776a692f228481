"""Messages to people who do not watch: what happened, by webhook and e-mail; nothing of it can delay a round."""
