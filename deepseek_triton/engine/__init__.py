"""Engine: schedule, run, sample, update."""
