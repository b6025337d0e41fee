"""What a run writes down about itself: the types, and the files they are kept in. Loads without torch."""
