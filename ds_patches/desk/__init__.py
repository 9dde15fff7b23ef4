"""What answers: the table of defects, doctor, explain, prove, train_check, status."""
