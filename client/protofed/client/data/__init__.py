"""A site's images and labels: sources, decoding, partitions and the tensors that training reads."""
