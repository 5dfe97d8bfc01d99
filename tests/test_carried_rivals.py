"""Which of the six architectures carry a direction in the sense measured: those whose stream sums all writes."""

import numpy as np
import pytest

from satlens.carried.documents import SKIP, DocumentSet, split
from satlens.carried.opening import read_model
from satlens.carried.proofs import prove
from satlens.carried.statics import linearity_error, measure
from satlens.errors import UserError


@pytest.mark.parametrize("model_type", ["denseformer", "muddformer", "dhc"])
def test_models_without_one_summing_stream_are_refused_in_one_line(make_model, model_type):
    with pytest.raises(UserError, match=rf"is a {model_type}: its blocks read averages or several streams"):
        read_model(make_model(model_type), None)


def test_resformer_is_measured_and_has_no_gate_that_reads(make_model):
    reader = read_model(make_model("ResFormer"), None)
    prove(reader)
    assert reader.value_reads == () and len(reader.reads) == reader.n_layers
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(1, 53, SKIP + 20 + i) for i in range(6))
    documents = DocumentSet(ids=ids, names=("d",) * 6, kinds=("d",) * 6)
    statics = measure(reader, split(documents))
    assert max(linearity_error(statics, read)[0] for read in reader.reads) < 1e-5
