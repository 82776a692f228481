"""A site's data: where it comes from, how a source is cut into sites, and the batches that methods train on."""
