"""Who one is: certificates, keys and the files that they lie in."""
