"""Tensors to bytes and back: the form of a round's start and of a contribution, in files and on the wire."""
