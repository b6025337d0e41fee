"""Runs on real machines: `protocol`, then `server` and `client` apart from each other, then `gateway` and `ray` over them."""
