"""Tensors as bytes, and back: what a round's start and a contribution are in files and on the wire."""
