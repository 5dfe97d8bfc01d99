"""The figures of dictionaries, labels and judges, as functions of their tables: no torch, no model.

Every function takes the tables by name and `info`, the run's summary; the dict at the foot of a file names them.
"""
