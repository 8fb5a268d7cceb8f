"""What several studies share: flags, training loops, distances, tables and result files."""
