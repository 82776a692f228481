"""What a site keeps between rounds: memory, staged updates and blobs that it fetched."""
