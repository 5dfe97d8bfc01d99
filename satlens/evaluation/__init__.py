"""Is the model any good at tasks, and does it use V1 there: task sets, their data, the harness, and answer spans.

A package, because four questions have nothing to do with each other: which tasks there are (``tasks``), where their
documents come from (``data``), how a retrieval prompt is made (``cloze``), and who scores (``harness``, the only file
that knows lm-evaluation-harness). ``spans`` needs none of that: it cuts a prompt into answer, mention, context, rest.
"""
