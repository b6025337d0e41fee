"""What a report draws: charts as data, one pure function each."""
