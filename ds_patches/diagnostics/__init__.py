"""Diagnostics: the table of defects, doctor, prove, train_check, status."""
