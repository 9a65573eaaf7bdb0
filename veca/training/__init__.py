"""What every training shares: the loop, checkpoints, ranks, records, the schedule."""
