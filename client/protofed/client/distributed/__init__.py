"""One site's training over several processes that torchrun starts."""
