"""The carried reference direction: what an MLP gate rests on, in any causal model and in SATFormer's own gate.

How the parts are used::

    reader = open_reader("path/or/shipped-name", reading)          # opening: any causal model, sites proved live
    sets = documents(reader, reading)                              # documents: sets.fit, sets.evaluate
    for rows in sets.evaluate.batches(8, reader.device, reader.pad):
        hidden = reader.run(rows.input_ids, hooks)                 # hooks: [(role, layer, function)], see reads.ROLES
        hidden, states = reader.run_keeping(rows.input_ids, [6])   # the state before block 6
        hidden = reader.run_from(states[6].with_residual(edited))  # blocks 6, 7, ... and what follows
        nll = reader.nll(hidden, rows)                             # float32 [scored], row-major
        logits = reader.logits(hidden[rows.far][:64])              # float32, chunk by chunk

A hook's function gets ``[batch pos width]`` and returns a replacement or None. ``rows.far`` are the positions that are
counted and edited; ``rows.docs_of(mask)`` says whose each is. ``reader.reads[layer]`` and ``reader.value_reads`` hold
the gates: ``z = weight @ x + bias`` with ``x`` at role ``read`` and ``z`` at ``pre`` (``value_read``, ``value_pre``).
"""
