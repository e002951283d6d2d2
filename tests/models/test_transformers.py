"""Networks of the library transformers as they come: outputs are objects, heads have names of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

import coterie
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.forward import only_tensor
from coterie.core.model import Model, make_model
from coterie.core.rehearsal import vmap_problem
from coterie.core.tasks import NextToken
from tests import toy

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]

VOCABULARY, LENGTH = 20, 8
SIZES = (13, 20, 5)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0,
        "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip


def bert(**changes: Any) -> nn.Module:
    about = {**SMALL, **STILL, "vocab_size": VOCABULARY, "num_labels": toy.CLASSES, "max_position_embeddings": LENGTH}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**{**about, **changes}))


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, num_labels=toy.CLASSES, max_position_embeddings=LENGTH, dim=16, n_layers=2, n_heads=2,
        hidden_dim=32, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return transformers.DistilBertForSequenceClassification(config)


def vit() -> nn.Module:
    shape = {"image_size": 12, "patch_size": 4, "num_channels": 1, "num_labels": toy.CLASSES}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape, **SMALL))


def gpt2(**changes: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **changes))


class Case(NamedTuple):
    network: Callable[[], nn.Module]
    head: str
    targets: list[str]  # of LoRA
    saved: list[str] | None  # trained in full, next to LoRA


CASES = {
    "bert": Case(bert, "classifier", ["query", "value"], ["classifier"]),
    "distilbert": Case(distilbert, "classifier", ["q_lin", "v_lin"], ["pre_classifier", "classifier"]),
    "vit": Case(vit, "classifier", ["query", "value", "q_proj", "v_proj"], ["classifier"]),
    "gpt2": Case(lambda: gpt2(tie_word_embeddings=False), "lm_head", ["c_attn"], ["lm_head"]),
}


def data_for(name: str) -> FederatedData:
    if name == "vit":
        return toy.toy(augmented=False)

    def split(seed: int) -> Split:
        x = torch.randint(0, VOCABULARY, (sum(SIZES), LENGTH), generator=torch.Generator().manual_seed(seed))
        return Split(x[:, :-1], x[:, 1:], SIZES) if name == "gpt2" else Split(x, x[:, 0] % toy.CLASSES, SIZES)

    if name == "gpt2":
        return FederatedData("tokens", 0, split(0), split(1), task=NextToken(VOCABULARY))
    return FederatedData("tokens", toy.CLASSES, split(0), split(1))


def model_of(net: nn.Module, data: FederatedData, head: str | None = None) -> Model:
    sample = (data.shape, data.task, data.transform, head)
    return make_model(net, *sample, sample_type=data.train.x.dtype, label=data.label_shape).to("cpu", torch.float64)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("adapters", [False, True])
def test_stacked_equals_looped(name: str, adapters: bool) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    case, data = CASES[name], data_for(name)
    net = case.network()
    if adapters:
        config = LoraConfig(r=2, target_modules=case.targets, modules_to_save=case.saved, fan_in_fan_out=name == "gpt2")
        net = get_peft_model(net, config)
    made = model_of(net, data)
    assert case.head in made.head_name
    if adapters:
        assert all("lora_" in n or "modules_to_save" in n for n in made.start.encoder)
    for method in (toy.method(kind, local_epochs=1) for kind in ("fedavg", "fedper", "ditto")):
        assert vmap_problem(method, made, data.train.x[:4], data.train.y[:4]) == ""
        expected, _ = toy.looped(method, made, data, rounds=1)
        found, _ = toy.stacked(method, made, data, rounds=1)
        assert toy.distance(expected, found) < 1e-10


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_the_output_is_that_of_the_network(name: str) -> None:
    torch.manual_seed(0)
    net, data = CASES[name].network().eval(), data_for(name)
    result = coterie.run(toy.method("fedavg", local_epochs=0), data, net, rounds=1, backend="looped", progress=False)
    personal, x = result.personal_model(0), data.test.x
    with torch.no_grad():
        torch.testing.assert_close(personal(x), net(personal.preprocess(x)).logits)
        torch.testing.assert_close(personal.network()(personal.preprocess(x)).logits, personal(x))


def test_what_vmap_cannot_compute_is_looped_with_a_reason(tmp_path: Path) -> None:
    """GPT2ForSequenceClassification looks for the last token that is not padding."""
    config = transformers.GPT2Config(**GPT2, num_labels=toy.CLASSES, pad_token_id=1)
    net = transformers.GPT2ForSequenceClassification(config)
    data = data_for("bert").pick([0, 1, 2] * 3)
    out = tmp_path / "run"
    result = coterie.run(toy.method("fedavg", local_epochs=1), data, net, rounds=1, progress=False, out=out)
    assert result.config is not None
    assert result.config["ran"]["backend"] == "Looped"
    assert "clients run looped (torch cannot stack them: " in (out / "log.txt").read_text()


def test_tied_weights_are_refused_unless_they_are_frozen() -> None:
    from peft import LoraConfig, get_peft_model

    data = data_for("gpt2")
    with pytest.raises(CoterieError, match=r"transformer\.wte\.weight' are one parameter; .* untie or freeze them"):
        model_of(gpt2(), data)
    made = model_of(get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)), data)
    assert not made.start.head


def test_an_output_with_several_tensors_is_refused() -> None:
    encoder = transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=VOCABULARY))
    with pytest.raises(CoterieError, match="with the tensors last_hidden_state, pooler_output; it must return one"):
        model_of(encoder, data_for("bert"))


class Pair(NamedTuple):
    logits: Tensor
    auxiliary: Tensor | None = None


@pytest.mark.parametrize("output", [{"out": torch.ones(2)}, Pair(torch.ones(2)), (torch.ones(2), None)])
def test_the_only_tensor_of_an_output(output: object) -> None:
    assert torch.equal(only_tensor(output), torch.ones(2))


@pytest.mark.parametrize("output", [Pair(torch.ones(2), torch.ones(2)), {}, 3, [torch.ones(2)] * 2])
def test_no_tensor_is_chosen_among_several_or_none(output: object) -> None:
    with pytest.raises(CoterieError, match="it must return one tensor of outputs"):
        only_tensor(output)
