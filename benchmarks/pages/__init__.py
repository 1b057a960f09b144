"""Scripts that write docs, figures and the tables of the README from stored numbers and runs."""
