"""Messages to people who do not watch: what happened, by webhook and e-mail. No message can delay a round."""
