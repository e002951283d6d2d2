"""Adapters of peft: only they travel, every way of computing gives the same numbers, and peft reads what we write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

import coterie
from coterie.api.saved_run import load_run
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.model import Model, make_model
from coterie.models.attention import vit_tiny
from coterie.personal.export import export
from tests import toy, traffic

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]

ADAPTERS = 2 * (192 + 3 * 192) + 2 * (192 + 192)  # rank 2 on qkv and out of one block
HEAD = 192 * toy.CLASSES + toy.CLASSES


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return vit_tiny(toy.SHAPE, toy.CLASSES, patch=6, depth=1)


def adapted(**settings: Any) -> PeftModel:
    given = {"r": 2, "target_modules": ["qkv", "out"], "modules_to_save": ["head"], **settings}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(network(), LoraConfig(**given))


def model(net: nn.Module, dtype: torch.dtype = torch.float64, head: str | None = None) -> Model:
    return make_model(net, toy.SHAPE, toy.CLASSES, toy.toy().transform, head).to("cpu", dtype)


def trained(out: Path | None = None, name: str = "fedper", net: nn.Module | None = None) -> coterie.Result:
    method = toy.method(name, local_epochs=1)
    return coterie.run(
        method, toy.toy(), net or adapted(), rounds=2, seed=3, backend=toy.IN_TURN, out=out, progress=False
    )


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedrep", "ditto", "fedpac", "fedbabu", "lg-fedavg", "apfl"])
def test_stacked_equals_looped_and_only_adapters_travel(name: str) -> None:
    data, method = toy.toy(augmented=False), toy.method(name, local_epochs=1)
    expected, _ = toy.looped(method, model(adapted()), data, rounds=2)
    found, _ = toy.stacked(method, model(adapted()), data, rounds=2)
    assert toy.distance(expected, found) < 1e-10
    up, down = (f(ADAPTERS, HEAD, toy.CLASSES, 192) for f in traffic.NUMBERS[name])
    _, history = toy.looped(method, model(adapted(), torch.float32), data, rounds=1)
    assert (history[0].bytes_up, history[0].bytes_down) == (3 * 4 * up, 3 * 4 * down)


@pytest.mark.parametrize(
    ("settings", "head", "numbers"),
    [
        ({}, None, HEAD),
        ({}, "head", HEAD),  # the name in the network that was adapted
        ({"target_modules": ["qkv", "head"], "modules_to_save": None}, None, 2 * (192 + toy.CLASSES)),
        ({"modules_to_save": None}, None, 0),
    ],
)
def test_the_head_is_found_or_named(settings: dict[str, Any], head: str | None, numbers: int) -> None:
    made = model(adapted(**settings), head=head)
    assert sum(t.numel() for t in made.start.head.values()) == numbers
    assert made.dim == 192


def test_a_method_with_personal_heads_refuses_a_frozen_head() -> None:
    with pytest.raises(CoterieError, match=r"FedPer needs a head that it can train, but the head .* is frozen"):
        trained(net=adapted(modules_to_save=None))


def test_a_run_folder_holds_frozen_weights_once_and_personal_models_use_them(tmp_path: Path) -> None:
    result = trained(tmp_path / "run")
    kept = load_file(tmp_path / "run" / "models" / "frozen.safetensors")
    assert not any("lora_" in name for name in kept)
    for file in (tmp_path / "run" / "models").glob("client-*.safetensors"):
        assert sum(t.numel() for t in load_file(file).values()) < 2 * (ADAPTERS + HEAD)
    run, x = load_run(tmp_path / "run", adapted()), toy.toy().test.x
    with torch.no_grad():
        assert torch.equal(run.personal_model(2)(x), result.personal_model(2)(x))


def test_resume_is_exact(tmp_path: Path) -> None:
    def stop(record: Any) -> None:
        if record.number == 2:
            raise RuntimeError("a power cut")

    given: dict[str, Any] = {"rounds": 2, "seed": 3, "backend": "looped", "progress": False, "out": tmp_path / "run"}
    method = toy.method("fedper", local_epochs=1)
    with pytest.raises(RuntimeError, match="a power cut"):
        coterie.run(method, toy.toy(), adapted(), watch=stop, **given)
    again, whole = coterie.run(method, toy.toy(), adapted(), exist="resume", **given), trained()
    toy.assert_same(tree.flatten(again.server), tree.flatten(whole.server))
    toy.assert_same(tree.flatten(again.states[1]), tree.flatten(whole.states[1]))


def outputs(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.eval()(x)


def test_peft_loads_the_exported_adapter(tmp_path: Path) -> None:
    result = trained(tmp_path / "run")
    files = export(load_run(tmp_path / "run", adapted()), 1, "peft", tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in files}
    numbers = sum(t.numel() for t in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values())
    assert numbers == ADAPTERS + HEAD
    mine, x = result.personal_model(1), toy.toy().test.x
    loaded = PeftModel.from_pretrained(network(), tmp_path / "adapter")
    assert torch.equal(outputs(loaded, mine.preprocess(x)), outputs(mine, x))
    assert not torch.equal(outputs(mine, x), outputs(adapted(), mine.preprocess(x)))  # it was trained
    with pytest.raises(CoterieError, match="exists already"):
        mine.save_adapter(tmp_path / "adapter")


def test_the_merged_network_is_the_plain_one(tmp_path: Path) -> None:
    result, x = trained(), toy.toy().test.x
    mine = result.personal_model(1)
    merged, plain = mine.merged(), network(seed=5)
    torch.testing.assert_close(outputs(merged, x), outputs(mine, x), rtol=0, atol=1e-5)
    plain.load_state_dict(merged.network_state_dict())
    torch.testing.assert_close(outputs(plain, mine.preprocess(x)), outputs(mine, x), rtol=0, atol=1e-5)


def test_what_peft_cannot_hold_is_refused(tmp_path: Path) -> None:
    net = adapted()
    net.base_model.model.encoder[1].bias.requires_grad_(True)
    with pytest.raises(CoterieError, match=r"'.*encoder\.1\.bias' is trained but is no part of the adapter"):
        trained(net=net).personal_model(0).save_adapter(tmp_path / "adapter")
    plain = coterie.freeze(network(), except_="head")
    with pytest.raises(CoterieError, match="this network has no adapter of peft"):
        trained(net=plain).personal_model(0).save_adapter(tmp_path / "adapter")
    trained(tmp_path / "run")
    with pytest.raises(CoterieError, match="leave out --merge"):
        export(load_run(tmp_path / "run", adapted()), 1, "peft", tmp_path / "adapter", merge=True)
    assert not (tmp_path / "adapter").exists()
