"""The run's side: roster, journaled run, transfers and pauses, and the service composed of them. No HTTP, no Ray."""
