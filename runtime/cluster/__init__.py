"""A corpus decoded by many machines: cut into blocks, decoded by workers of Ray Data, written as shards, merged."""
