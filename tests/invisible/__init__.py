"""What a script keeps, hooks, copies, pickles and looks at is no business of a patch."""
