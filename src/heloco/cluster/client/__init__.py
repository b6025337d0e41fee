"""The machine's side of a run. It imports no server code."""
