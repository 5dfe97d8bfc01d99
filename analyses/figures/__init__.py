"""The figures of each analysis, as functions of its tables; the dict at the foot of a file names them.

Every function takes the tables by name and `info`: model, baseline, gate, n_tokens, n_documents.
"""
