"""Recording: scopes write integers into lanes, and finished lanes are resolved into columnar batches."""
