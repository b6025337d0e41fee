"""A machine's side of a run. It loads no server."""
