"""A table server: requests of workers in, tables changed, answers out."""
