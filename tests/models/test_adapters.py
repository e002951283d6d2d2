"""Partly frozen networks and adapters of low rank: what is trained, what it costs, and what is exported."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._C import _functorch as functorch

import coterie
from coterie.api.saved_run import load_run
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.model import Model, make_model
from coterie.execution import Looped, Stacked
from coterie.federation import Settings, federate
from coterie.models.adapters import LoRALinear, freeze, lora, merge
from coterie.models.attention import vit_tiny
from coterie.personal.export import export
from tests import toy, traffic

ATTENTION = "encoder.*.qkv|encoder.*.out"


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return vit_tiny(toy.SHAPE, toy.CLASSES, patch=6, depth=1)


def adapted(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return lora(network(), ATTENTION, rank=2, except_="head")


def model(net: nn.Module, dtype: torch.dtype = torch.float64) -> Model:
    return make_model(net, toy.SHAPE, toy.CLASSES, toy.toy().transform).to("cpu", dtype)


def trained_names(net: nn.Module) -> list[str]:
    return [name for name, p in net.named_parameters() if p.requires_grad]


def test_freeze_trains_what_is_named_and_changes_no_other_network() -> None:
    whole = toy.network(batch_norm=True)
    probe = freeze(whole, except_="7|5.b*")
    assert trained_names(probe) == ["5.bias", "7.weight", "7.bias"]
    assert len(trained_names(whole)) == len(list(whole.parameters()))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("hed", "unknown parameter 'hed': did you mean 'head'"),
        ("head|encoder.9", "unknown parameter 'encoder.9': did you mean"),
        ("fc", r"unknown parameter 'fc': there are encoder\..*, .* and \d+ more"),
    ],
)
def test_a_pattern_that_selects_nothing_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(CoterieError, match=said):
        freeze(network(), except_=pattern)


def test_lora_starts_as_the_network_and_adds_a_product_of_two_matrices() -> None:
    plain, net = network(), adapted()
    x = torch.rand(3, *toy.SHAPE)
    assert torch.equal(net(x), plain(x))
    layers = {n: m for n, m in net.named_modules() if isinstance(m, LoRALinear)}
    assert {n.rpartition(".")[2] for n in layers} == {"qkv", "out"}
    assert trained_names(net) == [
        *(f"{n}.lora_{part}" for n in layers for part in "AB"), "head.weight", "head.bias",
    ]  # fmt: skip
    layer, z = next(iter(layers.values())), torch.rand(5, 192)
    with torch.no_grad():
        layer.lora_B.normal_()
    by_hand = z @ (layer.base.weight + layer.lora_B @ layer.lora_A).T + layer.base.bias
    torch.testing.assert_close(layer(z), by_hand)
    scaled = lora(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), "0", rank=4, alpha=8)[0]  # type: ignore[index]
    assert scaled.scale == 2.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"targets": "*.qkv", "rank": 0}, "rank must be a positive integer, got 0"),
        ({"targets": "*.kqv"}, r"unknown linear layer '\*.kqv'"),
        ({"targets": "head", "except_": "head"}, "layer 'head' is named in targets and in except_"),
    ],
)
def test_settings_of_lora_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CoterieError, match=said):
        lora(network(), **settings)


@pytest.mark.parametrize("target", ["*.out_proj", "layers.0.self_attn"])
def test_projections_of_torch_attention_cannot_be_adapted(target: str) -> None:
    """Their weights are read, not called: an adapter would have no effect."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.Sequential(OrderedDict(layers=nn.ModuleList([layer]), head=nn.Linear(8, 2)))
    with pytest.raises(CoterieError, match=r"nn\.MultiheadAttention, 'layers\.0\.self_attn\.(in|out)_proj"):
        lora(net, f"{target}|*.linear1")
    assert isinstance(lora(net, "*.linear1|*.linear2")[0][0].linear1, LoRALinear)  # type: ignore[index]


def test_merged_is_the_same_function_in_plain_layers() -> None:
    net = adapted().double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    merged, x = merge(net), torch.rand(3, *toy.SHAPE, dtype=torch.float64)
    torch.testing.assert_close(merged(x), net(x), rtol=0, atol=1e-12)
    assert list(merged.state_dict()) == list(network().state_dict())
    assert any(isinstance(m, LoRALinear) for m in net.modules())


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedrep", "ditto", "fedpac", "scaffold"])
def test_stacked_equals_looped_and_bytes_are_those_of_the_adapters(name: str) -> None:
    data, method = toy.toy(augmented=False), toy.method(name, local_epochs=1)
    expected, _ = toy.looped(method, model(adapted()), data, rounds=2)
    found, _ = toy.stacked(method, model(adapted()), data, rounds=2)
    assert toy.distance(expected, found) < 1e-10
    adapters = 2 * (192 + 3 * 192) + 2 * (192 + 192)
    up, down = (f(adapters, 192 * 4 + 4, toy.CLASSES, 192) for f in traffic.NUMBERS[name])
    _, history = toy.looped(method, model(adapted(), torch.float32), data, rounds=1)
    assert (history[0].bytes_up, history[0].bytes_down) == (3 * 4 * up, 3 * 4 * down)


class Watched(nn.Linear):
    """Notes whether its weights are frozen, and whether they have a client axis."""

    seen: set[tuple[bool, bool]] = set()  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.out_features == 6, has_client_axis(self.weight)))
        return super().forward(x)


def has_client_axis(t: Tensor) -> bool:
    while functorch.is_functorch_wrapped_tensor(t):
        if functorch.is_batchedtensor(t):
            return True
        t = functorch.get_unwrapped(t)
    return False


def test_frozen_weights_have_no_client_axis_under_vmap() -> None:
    net = nn.Sequential(nn.Flatten(), Watched(144, 6).requires_grad_(False), nn.ReLU(), Watched(6, toy.CLASSES))
    made = make_model(net, toy.SHAPE, toy.CLASSES)
    Watched.seen.clear()
    federate(Stacked(toy.method("ditto"), made, toy.toy(augmented=False), 0), Settings(rounds=1))
    assert (False, True) in Watched.seen
    assert (True, False) in Watched.seen
    assert (True, True) not in Watched.seen


def test_what_clients_and_server_hold_scales_with_the_adapters() -> None:
    """Twenty clients: states and updates are twenty adapters, and no more."""
    data, net = toy.toy((4,) * 20, (2,) * 20, augmented=False), model(adapted(), torch.float32)
    assert tree.size(net.frozen) > 50 * tree.size(net.start.encoder)
    backend = Stacked(toy.method("ditto", local_epochs=1), net, data, 0)
    federate(backend, Settings(rounds=1))
    assert tree.size(backend.states.kept) == 20 * tree.size(net.start)


def run_into(out: Path | None, **settings: Any) -> coterie.Result:
    return coterie.run(
        toy.method("fedper", local_epochs=1), toy.toy(), adapted(), rounds=2, seed=3, backend=toy.IN_TURN, out=out,
        progress=False, **settings,
    )  # fmt: skip


@pytest.mark.long
def test_a_run_folder_with_adapters(tmp_path: Path) -> None:
    result = run_into(tmp_path / "run")
    models = tmp_path / "run" / "models"
    assert {name for name in load_file(models / "frozen.safetensors") if "lora" in name} == set()
    largest = max(file.stat().st_size for file in models.glob("client-*.safetensors"))
    assert largest < 0.1 * (models / "frozen.safetensors").stat().st_size
    run, x = load_run(tmp_path / "run", adapted(seed=9)), toy.toy().test.x
    mine, theirs = result.personal_model(1), run.personal_model(1)
    with torch.no_grad():
        assert torch.equal(mine(x), theirs(x))
        torch.testing.assert_close(mine.merged()(x), mine(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(mine.network()(mine.preprocess(x)), mine(x))
    plain = network(seed=4)
    plain.load_state_dict(mine.merged().network_state_dict())
    with torch.no_grad():
        torch.testing.assert_close(plain(mine.preprocess(x)), mine(x), rtol=0, atol=1e-5)


@pytest.mark.long
def test_resume_is_exact(tmp_path: Path) -> None:
    whole = run_into(None)

    def stop(record: Any) -> None:
        if record.number == 2:
            raise RuntimeError("a power cut")

    with pytest.raises(RuntimeError, match="a power cut"):
        run_into(tmp_path / "run", watch=stop)
    again = run_into(tmp_path / "run", exist="resume")
    toy.assert_same(tree.flatten(again.server), tree.flatten(whole.server))
    toy.assert_same(tree.flatten(again.states[1]), tree.flatten(whole.states[1]))


@pytest.mark.long
@pytest.mark.parametrize("form", ["safetensors", "onnx", "torch"])
def test_the_merged_export_has_plain_layers_and_equal_outputs(form: str, tmp_path: Path) -> None:
    run_into(tmp_path / "run")
    run = load_run(tmp_path / "run", adapted())
    ending = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt2"}[form]
    x = toy.toy().test.x[:5]
    path = export(run, 1, form, tmp_path / f"merged{ending}", merge=True)[0]
    with torch.no_grad():
        expected = run.personal_model(1)(x)
    if form == "safetensors":
        weights = load_file(path)
        assert not any("lora" in name for name in weights)
        plain = network(seed=4)
        plain.load_state_dict({name.removeprefix("plain."): t for name, t in weights.items()})
        found = plain(run.personal_model(1).preprocess(x))
    elif form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(["logits"], {"samples": x.numpy()})[0])
    else:
        found = torch.export.load(path).module()(x)
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-5)


def test_a_model_of_several_networks_cannot_be_merged() -> None:
    result = coterie.run(
        toy.method("fedrod", local_epochs=1), toy.toy(), freeze(toy.network(), "4|6"), rounds=1, progress=False,
        backend=toy.IN_TURN,
    )  # fmt: skip
    with pytest.raises(CoterieError, match="more than one network, so its adapters cannot be merged"):
        result.personal_model(0).merged()


def test_train_only_by_name(tmp_path: Path) -> None:
    """A network given by name is frozen by a pattern, which its run folder records."""
    out, method = tmp_path / "run", toy.method("fedavg", local_epochs=1)
    data = toy.toy((20, 31), (7, 9), augmented=False)
    given: dict[str, Any] = {"rounds": 1, "backend": "looped", "progress": False}
    result = coterie.run(method, data, "mlp", train_only="head", out=out, **given)
    weights = result.model.start
    assert not weights.encoder
    assert set(weights.head) == {"weight", "bias"}
    loaded = load_run(out)
    assert torch.equal(loaded.personal_model(0)(data.test.x), result.personal_model(0)(data.test.x))
    with pytest.raises(CoterieError, match="unknown parameter 'haed': did you mean 'head'"):
        coterie.run(method, data, "mlp", train_only="haed", **given)
    with pytest.raises(CoterieError, match="train_only needs a network or its name"):
        coterie.run(method, data, result.model, train_only="head", **given)


def test_looped_backend_does_not_copy_frozen_weights_for_clients() -> None:
    net = model(adapted(), torch.float32)
    backend = Looped(toy.method("ditto", local_epochs=1), net, toy.toy(augmented=False), 0, processes=1)
    before = {name: t.data_ptr() for name, t in backend.model.frozen.items()}
    federate(backend, Settings(rounds=1))
    assert {name: t.data_ptr() for name, t in backend.model.frozen.items()} == before
