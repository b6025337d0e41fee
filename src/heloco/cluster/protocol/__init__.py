"""What a machine and a run say to each other, whatever connects them."""
