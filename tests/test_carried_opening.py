"""Opening a model: sites found and alive, ledger entries true, restart exact, in every block style."""

from typing import Any

import numpy as np
import pytest
import torch
from planted import HEADS, LAYERS, STYLES, D, plant

from satlens.carried.ledger import ledger, value_ledger
from satlens.carried.opening import read_model, twin
from satlens.carried.proofs import prove
from satlens.carried.reader import Reader
from satlens.errors import SatlensError, UserError


@pytest.fixture(scope="module", params=STYLES)
def planted(request: pytest.FixtureRequest) -> tuple[Any, Reader]:
    made = plant(request.param)
    return made, read_model(made.model, None, name=request.param)


def rows_of(planted: Any) -> Any:
    return next(planted.documents.batches(len(planted.documents.ids)))


def close(one: Any, other: Any, scale: float = 1e-3) -> None:
    one, other = (
        np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, dtype=float) for x in (one, other)
    )
    assert np.abs(one - other).max() <= scale * max(1.0, np.abs(other).max())


def test_every_site_is_alive_and_every_restart_exact(planted):
    prove(planted[1])


def test_reads_and_streams_are_the_planted_tensors(planted):
    made, reader = planted
    rows, seen = rows_of(made), {}
    hooks = [
        (role, layer, lambda x, key=(role, layer): seen.__setitem__(key, x.clone()))
        for role in ("resid", "read", "pre")
        for layer in range(LAYERS)
    ]
    reader.run(rows.input_ids, hooks)
    ids = rows.input_ids[rows.real]
    for layer in range(LAYERS):
        close(seen["resid", layer][rows.real], made.stream[layer][ids])
        close(seen["read", layer][rows.real], made.read[layer][ids])
        weight, bias = reader.read(layer).weight.double().numpy(), made.bias[layer]
        close(seen["pre", layer][rows.real], made.read[layer][ids] @ weight.T + bias)
        close(weight @ made.mean(made.read[layer]), made.coupling[layer])


def test_ledger_says_what_was_planted(planted):
    made, reader = planted
    for layer, entry in enumerate(ledger(reader)):
        assert entry.block == made.style.block
        assert entry.norm.name == made.style.mlp_norm
        assert entry.norm.centred == made.style.centred
        assert (entry.exit_norm.name if entry.exit_norm else None) == made.style.exit_norm
        close(entry.attention_constant, made.writes["attention"][layer])
        close(entry.mlp_bias, made.writes["mlp"][layer])
        assert not entry.renormed


def test_value_bias_reaches_the_stream_through_the_out_projection(planted):
    made, reader = planted
    if made.style.value(reader.layers[0]) is None:
        assert all(not entry.value_constant.abs().max() > 1e-4 for entry in ledger(reader))
        return
    for layer, entry in enumerate(ledger(reader)):
        alone = made.writes["attention"][layer] - entry.attention_bias.numpy()
        close(entry.value_constant, alone)
        assert np.abs(alone).max() > 0.1


def test_a_hook_that_changes_nothing_leaves_the_pass_bit_equal(planted):
    made, reader = planted
    ids = rows_of(made).input_ids
    hooks = [(role, layer, lambda x: x.clone()) for role, sites in reader.sites.items() for layer in sites]
    assert torch.equal(reader.run(ids, hooks), reader.run(ids))


def test_restart_from_a_changed_stream_is_the_edited_pass(planted):
    made, reader = planted
    ids = rows_of(made).input_ids
    _, states = reader.run_keeping(ids, [1])
    push = torch.linspace(-1, 1, D)
    edited = reader.run(ids, [("resid", 1, lambda x: x + push)])
    assert torch.equal(reader.run_from(states[1].with_residual(states[1].residual + push)), edited)
    assert not torch.equal(edited, reader.run(ids))
    both = reader.run_from(states[1].repeat(2))
    close(both[: len(ids)], reader.run(ids), 1e-5)
    close(both[len(ids) :], reader.run(ids), 1e-5)


def test_nll_is_that_of_the_models_own_logits(planted):
    made, reader = planted
    rows = rows_of(made)
    with torch.no_grad():
        logits = made.model(input_ids=rows.input_ids).logits.double()
    own = -logits[:, :-1].log_softmax(-1).gather(-1, rows.input_ids[:, 1:, None])[..., 0][rows.scored[:, :-1]]
    close(reader.nll(reader.run(rows.input_ids), rows), own, 1e-4)


@pytest.mark.parametrize("name", ["opt-pre", "opt-post"])  # the family that flattens batch and position
def test_opt_tensors_are_unfolded_per_row(name):
    made = plant(name)
    reader = read_model(made.model, None)
    rows, shapes = rows_of(made), []
    reader.layers[0].fc1.register_forward_hook(lambda _, args, __: shapes.append(args[0].dim()))
    reader.run(rows.input_ids, [("read", 0, lambda x: shapes.append(x.shape) or None)])
    assert 2 in shapes and (*rows.input_ids.shape, D) in shapes


def test_an_edit_in_a_flattened_model_reaches_its_own_position_alone():
    reader = read_model(plant("opt-pre").model, None)
    ids = torch.arange(8).expand(2, 8).contiguous() % 8

    def push(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out[1, 5] += torch.linspace(-9, 9, D)
        return out

    difference = (reader.run(ids, [("mlp_out", LAYERS - 1, push)]) - reader.run(ids)).abs().amax(-1)
    assert (difference > 1e-2).nonzero().tolist() == [[1, 5]]


def test_gates_of_satformer_read_the_attention_norm():
    reader = read_model(plant("satformer").model, None)
    assert [read.layer for read in reader.value_reads] == [1, 2]
    assert all(read.n_gates == HEADS for read in reader.value_reads)
    assert {norm.name for norm in value_ledger(reader).values()} == {"attn_norm"}


def test_twin_has_the_shape_and_other_weights():
    reader = read_model(plant("gpt2").model, None)
    first, again, other = twin(reader, 1), twin(reader, 1), twin(reader, 2)
    assert torch.equal(first.read(0).weight, again.read(0).weight)
    assert not torch.equal(first.read(0).weight, other.read(0).weight)
    assert first.read(0).weight.shape == reader.read(0).weight.shape


def test_a_mixture_of_experts_is_refused():
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
        vocab_size=11, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(UserError, match="no MLP gate linear"):
        read_model(transformers.AutoModelForCausalLM.from_config(config), None)


def test_a_dead_site_is_refused():
    made = plant("llama")
    with torch.no_grad():
        made.model.model.layers[1].mlp.down_proj.weight.zero_()
    with pytest.raises(UserError, match=r"editing read of layer 1 moves no logit"):
        prove(read_model(made.model, None))


def test_another_activation_than_the_configs_is_refused():
    made = plant("qwen2")
    reader = read_model(made.model, None)
    made.model.model.layers[2].mlp.act_fn = torch.nn.Tanh()
    with pytest.raises(UserError, match="layer 2 does not compute silu"):
        prove(reader)


def test_a_tensor_of_another_length_is_refused():
    made = plant("gpt2")
    reader = read_model(made.model, None)
    ids = torch.zeros(2, 16, dtype=torch.long)
    site = reader.site("read", 0)
    site.module.register_forward_pre_hook(lambda _, args: (args[0][:, 1:],))
    with pytest.raises(SatlensError, match="expected"):
        reader.run(ids, [("read", 0, lambda x: None)])


def test_a_hook_before_the_restart_is_refused():
    reader = read_model(plant("gpt2").model, None)
    _, states = reader.run_keeping(torch.zeros(1, 8, dtype=torch.long), [2])
    with pytest.raises(SatlensError, match="cannot fire"):
        reader.run_from(states[2], [("resid", 1, lambda x: x)])
    with pytest.raises(UserError, match="layer 9 has no read"):
        reader.run(torch.zeros(1, 8, dtype=torch.long), [("read", 9, lambda x: x)])


def test_norms_of_equal_values_are_told_apart():
    import transformers

    config = transformers.GPTNeoXConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=31,
        max_position_embeddings=64,
    )  # fmt: skip
    fresh = transformers.AutoModelForCausalLM.from_config(config)  # both norms of a block are still the same
    assert {entry.norm.name for entry in ledger(read_model(fresh, None))} == {"post_attention_layernorm"}
