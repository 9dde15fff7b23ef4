"""What answers: tables of defects and upstream's fixes, doctor, explain, prove, train_check."""
