"""A run on real machines: one service around the synchronizer, and what connects machines to it."""
