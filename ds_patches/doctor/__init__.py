"""What `doctor` looks at beside the patches themselves: stale locks, and trials in a process."""
