"""The messages between a machine and a run, independent of the transport."""
