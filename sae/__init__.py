"""V1 dictionaries: the token table, Top-K training, features, judges and labels live here as they are built."""
