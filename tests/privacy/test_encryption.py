"""Encrypted training gives what plain training gives, and a server without the secret key reads nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

import coterie
from coterie.cli import main
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model, make_model
from coterie.execution import Looped
from coterie.federation import History, Settings, federate
from coterie.methods import METHODS, fedavg, fedcrc
from coterie.methods.fedpac import method as fedpac
from coterie.privacy import ckks
from coterie.privacy.encryption import Encrypted
from coterie.privacy.examine import examine
from coterie.privacy.keys import CkksKeys, load_secret, make_keys, new_keys
from tests import toy
from tests.machines import Missing
from tests.test_every_method import broken

pytest.importorskip("tenseal")

REFUSED = {
    "local": "send nothing",
    "fedproto": "send no weights, only statistics",
    "fedgh": "its server trains on what clients send",
    "fedgen": "its server trains on what clients send",
    "fedtgp": "its server trains on what clients send",
    "feddyn": "multiplies its state for `drift` by different factors",
    "fedavgm": "multiplies its state for `speed` by different factors",
    "fedopt": "computes `weights` from the clients' weights, but not as a linear combination",
    "fedamp": "computes `attention` from the clients' weights, but not as a linear combination",
    "fedfomo": "`values` depend on the eighth digit",
    "pfedla": "computes `hyper` from the clients' weights, but not as a linear combination",
    "pfedhn": "does more with the clients' weights than add them",
    "q-fedavg": "computes `weights` from the clients' weights, but not as a linear combination",
    "fedpac-proto": "does more with the clients' weights than add them",
    "fedcac": "does more with the clients' weights than add them",
    "cfl": "does more with the clients' weights than add them",
    "floco": "does more with the clients' weights than add them",
}


@pytest.fixture(scope="module")
def keys() -> CkksKeys:
    return new_keys()


def census(*samples: int) -> Census:
    return Census(torch.tensor(samples), torch.ones(len(samples), toy.CLASSES, dtype=torch.int64))


def models(weights: Any, *values: float) -> Any:
    """One for each value, which all its numbers are."""
    return tree.stack([tree.apply(lambda t, v=v: torch.full_like(t, v), weights) for v in values])


def assert_all(weights: Any, value: float) -> None:
    for t in tree.leaves(weights):
        assert torch.allclose(t, torch.full_like(t, value), rtol=0, atol=1e-6)


def sealed(method: Encrypted, ups: Any) -> Any:
    """As clients send it."""
    rows = [tree.pick(ups, row) for row in range(len(tree.leaves(ups)[0]))]
    return tree.stack([up._replace(**{n: method._seal(getattr(up, n)) for n in method.parts.up}) for up in rows])


def averaged(method: Encrypted, *values: float) -> tuple[Any, Any]:
    """FedAvg's server before it receives such models from clients with 1, 2, ... samples; and what they send."""
    model, m = toy.model(), len(values)
    up = fedavg.Up(models(model.start, *values), torch.arange(1.0, m + 1))
    return method.server_init(model, census(*range(1, m + 1))), sealed(method, up)


def played(method: AnyMethod, model: Model, processes: int = 1, **settings: Any) -> tuple[Any, tree.Tree, History]:
    clients = Looped(method, model, toy.toy(), 7, processes=processes)
    server, history = federate(clients, Settings(**{"rounds": 2, "join_ratio": 0.6, "seed": 7} | settings))
    states = tree.flatten({str(i): toy.unpadded(clients.states[i]) for i in range(clients.data.num_clients)})
    clients.close()
    return server, states, history


def assert_same_scores(plain: History, encrypted: History) -> None:
    for a, b in zip(plain, encrypted, strict=True):
        assert a.scores.keys() - b.scores.keys() <= {("global", "test"), ("new_global", "test")}
        for point, scores in b.scores.items():
            assert torch.equal(a.scores[point].weighted, scores.weighted), point
            assert torch.allclose(a.scores[point].loss, scores.loss, atol=1e-4), point


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_as_without_encryption_or_refused_with_the_reason(name: str, keys: CkksKeys) -> None:
    method, model = toy.method(name), toy.model(torch.float32, batch_norm=name in ("fedrep", "scaffold"))
    if name in REFUSED:
        with pytest.raises(CoterieError, match=f"^{method.title} cannot be encrypted: .*{REFUSED[name]}"):
            Encrypted(inner=method, keys=keys)
        return
    around = Encrypted(inner=method, keys=keys)
    server, states, history = played(method, model)
    hidden, remembered, measured = played(around, model)
    assert toy.distance(tree.flatten(server), tree.flatten(around.reveal(hidden))) < 1e-4
    assert toy.distance(states, remembered) < 1e-4
    assert_same_scores(history, measured)


@pytest.mark.parametrize(
    ("name", "settings"), [("scaffold", {}), ("scaffold", {"controls_of_participants": True}), ("fedcrc", {})]
)
def test_errors_do_not_grow_with_the_rounds(name: str, settings: dict[str, Any], keys: CkksKeys) -> None:
    """These keep something of the old model, or add to it, in every round."""
    method, model = replace(toy.method(name), **settings), toy.model()
    around = Encrypted(inner=method, keys=keys)
    server, states, _ = played(method, model, rounds=8, evaluate_every=8)
    hidden, remembered, _ = played(around, model, rounds=8, evaluate_every=8)
    assert toy.distance(tree.flatten(server), tree.flatten(around.reveal(hidden))) < 1e-6
    assert toy.distance(states, remembered) < 1e-6


def test_several_processes_and_several_ciphertexts(keys: CkksKeys) -> None:
    """A network of more numbers than a ciphertext has; workers are forked after many keys were used."""
    for _ in range(5):
        ckks.encrypt(new_keys(), torch.ones(1))
    wide = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))
    model = make_model(wide, toy.SHAPE, toy.CLASSES)
    method = toy.method("fedpac")
    around = Encrypted(inner=method, keys=keys)
    server, _, _ = played(method, model)
    hidden, _, _ = played(around, model, processes=2)
    assert hidden.encoder.ciphertexts.shape[0] == 2
    assert toy.distance(tree.flatten(server), tree.flatten(around.reveal(hidden))) < 1e-4


# Weights of the sums


def test_fedavg_weights_clients_by_their_samples(keys: CkksKeys) -> None:
    around = Encrypted(inner=METHODS["fedavg"](), keys=keys)
    server, ups = averaged(around, 8.0, -4.0, 2.0)
    found = around.reveal(around.server_receive(server, torch.arange(3), ups))
    assert_all(found.weights, 8 / 6 - 4 * 2 / 6 + 2 * 3 / 6)


def test_fedpac_combines_heads_by_its_quadratic_program(keys: CkksKeys) -> None:
    """Two clients: client 0 takes t of the other's head, where t v_1 + t |h_0 - h_1|² = (1 - t) v_0."""
    around, model = Encrypted(inner=METHODS["fedpac"](), keys=keys), toy.model()
    server = around.server_init(model, census(5, 5, 5))
    moments = torch.zeros(2, toy.CLASSES, model.dim, dtype=torch.float64)
    moments[1, 0, 0] = 2.0  # a squared distance of 4
    up = fedpac.Up(
        models(model.start.encoder, 1.0, 3.0),
        models(model.start.head, 10.0, 20.0),
        torch.zeros_like(moments),
        moments,
        torch.tensor([3.0, 1.0], dtype=torch.float64),
        torch.tensor([[1.0, 0, 0, 0], [3.0, 0, 0, 0]], dtype=torch.float64),
    )
    found = around.reveal(around.server_receive(server, torch.tensor([0, 2]), sealed(around, up)))
    t, s = 3 / (3 + 1 + 4), 1 / (3 + 1 + 4)
    assert_all(tree.pick(found.heads, 0), (1 - t) * 10 + t * 20)
    assert_all(tree.pick(found.heads, 2), s * 10 + (1 - s) * 20)
    assert toy.distance(tree.pick(found.heads, 1), model.start.head) < 1e-6  # did not take part
    assert_all(found.encoder, 2.5)
    assert torch.allclose(found.head_weights, torch.tensor([[1 - t, t], [s, 1 - s]], dtype=torch.float64))


def test_what_stays_of_an_old_sum_is_taken_outside(keys: CkksKeys) -> None:
    """FedCRC's head after two rounds, by hand: 0.9 (0.9 start + 0.1 a) + 0.1 b."""
    around, model = Encrypted(inner=METHODS["fedcrc"](inertia=0.9), keys=keys), toy.model()
    server = around.server_init(model, census(4, 4))
    for a, b in ((4.0, 8.0), (1.0, 1.0)):
        up = fedcrc.Up(models(model.start.encoder, a, b), models(model.start.head, a, b), torch.tensor([4.0, 4.0]))
        server = around.server_receive(server, torch.tensor([0, 1]), sealed(around, up))
    expected = tree.apply(lambda t: 0.81 * t + 0.09 * 6.0 + 0.1 * 1.0, model.start.head)
    assert toy.distance(around.reveal(server).head, expected) < 1e-6
    assert float(server.head.factor) == pytest.approx(0.81)


@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_sums_are_right_to_seven_digits_after_the_point(size: float, keys: CkksKeys) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.rand(5000, generator=draw, dtype=torch.float64) * 2 * size - size for _ in range(2))
    terms = {j: ckks.Term(ckks.encrypt(keys, values), 1.0, "of a test") for j, values in enumerate((a, b))}
    sums, factors = ckks.combine(keys, terms, torch.tensor([[0.3, 0.7], [1.0, 0.0]], dtype=torch.float64))
    assert sums.shape == (2, 2, ckks.SUM)
    assert factors.tolist() == [1.0, 1.0]
    assert float((ckks.decrypt(keys, sums[0], 5000) - (0.3 * a + 0.7 * b)).abs().max()) < 1e-7
    assert float((ckks.decrypt(keys, sums[1], 5000) - a).abs().max()) < 1e-7
    assert not torch.equal(sums[0], sums[1])
    assert not torch.equal(ckks.encrypt(keys, a), terms[0].ciphertexts)  # encryption is random


def test_no_room_for_a_sum_is_an_error(keys: CkksKeys) -> None:
    """Numbers up to 2^10 in a modulus that holds 2^19."""
    fresh = ckks.Term(ckks.encrypt(keys, torch.ones(3)), 1.0, "of a test")
    ckks.combine(keys, {0: fresh}, torch.tensor([[511.0]]))
    with pytest.raises(CoterieError, match="cannot hold this sum"):
        ckks.combine(keys, {0: fresh}, torch.tensor([[513.0]]))
    largest = ckks.Term(ckks.encrypt(keys, torch.full((3,), ckks.LIMIT)), 1.0, "of a test")
    total, factor = ckks.combine(keys, {0: largest}, torch.tensor([[511.0]]))
    assert factor.tolist() == [1.0]
    assert torch.allclose(ckks.decrypt(keys, total[0], 3), torch.tensor([511.0 * 1024] * 3, dtype=torch.float64))


# Methods that need more than sums


@dataclass(frozen=True)
class Median(fedavg.FedAvg):
    title: ClassVar[str] = "Median"

    def server_receive(self, server: fedavg.Server, clients: Any, ups: fedavg.Up) -> fedavg.Server:
        return fedavg.Server(tree.apply(lambda t: t.median(0).values, ups.weights))


@dataclass(frozen=True)
class Clipped(fedavg.FedAvg):
    """A sum as long as models are small."""

    title: ClassVar[str] = "Clipped"

    def server_receive(self, server: fedavg.Server, clients: Any, ups: fedavg.Up) -> fedavg.Server:
        mean = tree.average(ups.weights, ups.samples)
        norm = torch.stack([t.norm() for t in tree.leaves(mean)]).norm()
        return fedavg.Server(tree.apply(lambda t: t * (500 / norm).clamp_max(1), mean))


@dataclass(frozen=True)
class Swapped(fedavg.FedAvg):
    """The mean, but the head's bias is that of the first client."""

    title: ClassVar[str] = "Swapped"

    def server_receive(self, server: fedavg.Server, clients: Any, ups: fedavg.Up) -> fedavg.Server:
        mean = tree.average(ups.weights, ups.samples)
        return fedavg.Server(mean._replace(head=mean.head | {"bias": ups.weights.head["bias"][0]}))


@pytest.mark.parametrize("kind", [Median, Clipped, Swapped])
def test_a_server_that_does_more_than_sums_is_refused(kind: Callable[[], AnyMethod]) -> None:
    with pytest.raises(CoterieError, match=f"^{kind().title} cannot be encrypted: its server"):
        examine(kind())


def test_the_server_has_no_global_model(keys: CkksKeys) -> None:
    method = Encrypted(inner=toy.method("fedrod"), keys=keys)
    _, _, history = played(method, toy.model(), rounds=1)
    assert not any(point == "global" for point, _ in history[0].scores)


# What goes wrong


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_client_that_diverges_is_left_out(name: str, keys: CkksKeys, caplog: pytest.LogCaptureFixture) -> None:
    data = broken(toy.toy(augmented=False), (3,))
    method = Encrypted(inner=toy.method(name), keys=keys)
    clients = Looped(method, toy.model(), data, 7, processes=1)
    server, history = federate(clients, Settings(rounds=2, seed=7))
    assert all(record.left_out == (3,) for record in history if "train" in record.seconds)
    assert "client 3 is left out" in caplog.text
    assert all(t.isfinite().all() for t in tree.leaves(method.reveal(server)))
    plain, _ = federate(Looped(toy.method(name), toy.model(), data, 7, processes=1), Settings(rounds=2, seed=7))
    assert toy.distance(tree.flatten(plain), tree.flatten(method.reveal(server))) < 1e-5


class Damaging(Looped):
    """Client 3 sends a ciphertext with one bit flipped, or with a checksum that fits what is none."""

    forged = False

    def compute(self, request: Any, cohort: Any, states: Any, downs: Any) -> Any:
        made = super().compute(request, cohort, states, downs)
        if request.action != "train" or 3 not in cohort.clients:
            return made
        flat = tree.flatten(made[1])
        name = next(n for n in flat if n.endswith("ciphertexts"))
        flat[name] = flat[name].clone()
        row = flat[name][cohort.clients.tolist().index(3)].view(-1, flat[name].shape[-1])[0]
        row[5000] ^= 1
        if self.forged:
            length = int.from_bytes(row[:4].numpy().tobytes(), "little")
            check = zlib.crc32(row[8 : 8 + length].random_(0, 255).numpy().tobytes())
            row[4:8] = torch.tensor(list(check.to_bytes(4, "little")), dtype=torch.uint8)
        return made[0], tree.fill(made[1], flat)

    def score_trained(self, downs: Any, returned: Any, split: str) -> Any:
        return self.score(returned.clients, downs, split)  # the liar measures itself with what it did not send


@pytest.mark.parametrize("forged", [False, True])
def test_a_damaged_ciphertext_leaves_one_client_out(
    forged: bool, keys: CkksKeys, caplog: pytest.LogCaptureFixture
) -> None:
    data, method = toy.toy(augmented=False), Encrypted(inner=toy.method("fedper"), keys=keys)
    clients = Damaging(method, toy.model(), data, 7, processes=1)
    clients.forged = forged
    server, history = federate(clients, Settings(rounds=1, seed=7))
    assert history[0].left_out == (3,)
    words = "cannot use its update: a ciphertext cannot be used" if forged else "has a damaged ciphertext"
    assert words in caplog.text
    plain = Missing(toy.method("fedper"), toy.model(), data, 7, processes=1)
    plain.left_out = {0: {3}}
    expected, _ = federate(plain, Settings(rounds=1, seed=7))
    assert toy.distance(tree.flatten(expected), tree.flatten(method.reveal(server))) < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1025.0, -1e30])
def test_numbers_that_cannot_be_encrypted_are_told(value: float, keys: CkksKeys) -> None:
    """By a factor that is not a number: the loop leaves the client out. Should it not, the server refuses."""
    around = Encrypted(inner=METHODS["fedavg"](), keys=keys)
    server, ups = averaged(around, 1.0, value)
    assert tree.finite(ups, 2).tolist() == [True, False]
    with pytest.raises(CoterieError, match=r"not finite.* from client 5"):
        around.server_receive(server, torch.tensor([3, 5]), ups)


def test_other_keys_are_refused_on_both_sides(keys: CkksKeys) -> None:
    ours, theirs = (Encrypted(inner=METHODS["fedavg"](), keys=k) for k in (keys, new_keys()))
    server, _ = averaged(ours, 1.0, 2.0)
    _, ups = averaged(theirs, 1.0, 2.0)
    with pytest.raises(CoterieError, match="from client 0 are encrypted with other keys"):
        ours.server_receive(server, torch.tensor([0, 1]), ups)
    with pytest.raises(CoterieError, match="from the server are encrypted with other keys"):
        theirs.reveal(ours.server_send(server, torch.tensor(0)))


@pytest.mark.parametrize("place", [0, 3, 5, 8, 30, 5000, 200_000])
def test_a_damaged_ciphertext_is_refused(place: int, keys: CkksKeys) -> None:
    around = Encrypted(inner=METHODS["fedavg"](), keys=keys)
    server, ups = averaged(around, 1.0, 2.0)
    ups.weights.ciphertexts[1, 0, place] ^= 1
    with pytest.raises(CoterieError, match="damaged: from client 7"):
        around.server_receive(server, torch.tensor([2, 7]), ups)
    down = around.server_send(server, torch.tensor(0))
    changed = down.weights.ciphertexts.clone()
    changed[0, min(place, 100_000)] ^= 1
    with pytest.raises(CoterieError, match="damaged: what the server sent"):
        around.reveal(down._replace(weights=down.weights._replace(ciphertexts=changed)))


def test_too_few_ciphertexts_are_refused(keys: CkksKeys) -> None:
    around = Encrypted(inner=METHODS["fedavg"](), keys=keys)
    server, _ = averaged(around, 1.0)
    cut = server.weights._replace(ciphertexts=server.weights.ciphertexts[:0])
    with pytest.raises(CoterieError, match="need 1 ciphertexts, not 0"):
        around.reveal(server._replace(weights=cut))


# A server of its own

SERVER = """
import sys
import zlib
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.method import Census
from coterie.methods import METHODS, fedavg
from coterie.privacy.encryption import Encrypted
from coterie.privacy.keys import load_public
from tests import toy
from tests.machines import Missing

folder = Path(sys.argv[1])
assert [path.name for path in folder.glob("*.ckks")] == ["public.ckks"]
method = Encrypted(inner=METHODS["fedavg"](), keys=load_public(folder))
server = method.server_init(toy.model(), Census(torch.ones(2), torch.ones(2, 4)))
up = fedavg.Up(server.weights, torch.ones(()))
up = tree.fill(up, load_file(folder / "ups.safetensors"))
server = method.server_receive(server, torch.arange(2), up)
try:
    method.reveal(server)
except CoterieError as error:
    print(error)
try:
    context = method.keys.context()
    from coterie.privacy import ckks
    ckks.load(context, server.weights.ciphertexts[0].numpy().tobytes(), "").decrypt()
except ValueError as error:
    print(error)
save_file(tree.flatten(method.server_send(server, torch.tensor(0))), folder / "down.safetensors")
"""


def test_a_server_with_the_public_key_adds_up_and_reads_nothing(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    there = tmp_path / "server"
    there.mkdir()
    (tmp_path / "keys" / "public.ckks").rename(there / "public.ckks")
    client = Encrypted(inner=METHODS["fedavg"](), keys=load_secret(tmp_path / "keys"))
    assert client.keys == keys
    server, ups = averaged(client, 3.0, 6.0)
    save_file({name: t.contiguous() for name, t in tree.items(ups)}, there / "ups.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(there)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, "."])},
    )
    assert done.returncode == 0, done.stderr
    ours, tenseals = done.stdout.splitlines()
    assert "has the public key only" in ours
    assert "doesn't hold a secret_key" in tenseals
    down = tree.fill(client.server_send(server, torch.tensor(0)), load_file(there / "down.safetensors"))
    assert_all(client.reveal(down).weights, 5.0)  # 1/3 and 2/3


# A whole run


def test_a_run_leaves_readable_models_and_no_key(tmp_path: Path) -> None:
    def run(out: Path, **encryption: Any) -> coterie.Result:
        given = {"rounds": 2, "local_epochs": 1, "join_ratio": 0.6, "new_clients": 0.2, "seed": 3}
        where = coterie.Execution(backend="looped", processes=1)
        return coterie.run("fedpac", toy.toy(), toy.network(), backend=where, out=out, **given, **encryption)

    plain = run(tmp_path / "plain")
    hidden = run(tmp_path / "hidden", encrypt="ckks")
    x = toy.toy().test.x
    for client in range(4):
        ours, theirs = (result.personal_model(client)(x) for result in (plain, hidden))
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert_same_scores(plain.history, hidden.history)  # newcomers too, who get the mean of all heads
    a, b = (load_file(tmp_path / name / "models" / "server.safetensors") for name in ("plain", "hidden"))
    assert toy.distance(a, b) < 1e-4
    config = json.loads((tmp_path / "hidden" / "config.json").read_text())
    assert config["encryption"] == {"encrypt": "ckks", "key": None}
    assert config["method"] == json.loads((tmp_path / "plain" / "config.json").read_text())["method"]
    assert not list((tmp_path / "hidden").rglob("*.ckks"))


def test_a_run_with_kept_keys_can_be_resumed(tmp_path: Path) -> None:
    def run(keys: Path, exist: str, watch: Any = lambda record: None) -> coterie.Result:
        given = {"encrypt": "ckks", "keys": str(keys), "out": tmp_path / "run", "exist": exist, "watch": watch}
        return coterie.run("hypcluster", toy.toy(), toy.network(), backend=where, rounds=3, seed=3, **given)

    def stop(record: Any) -> None:
        if record.number == 3:
            raise CoterieError("enough")

    where = coterie.Execution(backend="looped", processes=1)
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    with pytest.raises(CoterieError, match=r"enough; the checkpoint of round 2 is kept"):
        run(tmp_path / "keys", exist="error", watch=stop)
    with pytest.raises(CoterieError, match=r"encryption\.key was"):
        run(tmp_path / "others", exist="resume")
    found = run(tmp_path / "keys", exist="resume")
    plain = coterie.run("hypcluster", toy.toy(), toy.network(), backend=where, rounds=3, seed=3)
    assert toy.distance(tree.flatten(plain.server), tree.flatten(found.server)) < 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encrypt": "rsa"}, "unknown encryption 'rsa'"),
        ({"keys": "somewhere"}, "requires --encrypt ckks"),
        ({"encrypt": "ckks", "keys": "nowhere"}, "key nowhere not found"),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, str], message: str) -> None:
    with pytest.raises(CoterieError, match=message):
        coterie.run("fedavg", toy.toy(), toy.network(), rounds=1, **settings)


def test_encrypted_clients_are_not_stacked(keys: CkksKeys) -> None:
    with pytest.raises(CoterieError, match="cannot be stacked"):
        coterie.run("fedavg", toy.toy(), toy.network(), rounds=1, encrypt="ckks", backend="stacked")


def test_keys_are_not_shown(keys: CkksKeys) -> None:
    assert repr(Encrypted(inner=METHODS["fedavg"](), keys=keys)).count("keys") == 0
    assert repr(keys) == "CkksKeys()"


def test_precision_in_float32_and_type(keys: CkksKeys) -> None:
    around = Encrypted(inner=METHODS["fedavg"](), keys=keys)
    model = toy.model(torch.float32)
    found = around.reveal(around.server_send(around.server_init(model, census(2)), torch.tensor(0)))
    assert toy.distance(tree.flatten(found.weights), tree.flatten(model.start)) < 1e-6
    assert all(t.dtype == torch.float32 for t in tree.leaves(found))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--num-clients", "4", "--local-size", "40", "--test-size", "20", "--processes", "1", "--model", "linear"]
    main(["keys", str(tmp_path / "keys")])
    found = []
    for name, flags in (("plain", []), ("hidden", ["--encrypt", "ckks", "--keys", str(tmp_path / "keys")])):
        main(["run", "fedpac", *tiny, "-gr", "2", *flags, "--out", str(tmp_path / name)])
        found.append(json.loads((tmp_path / name / "result.json").read_text()))
    assert found[0]["outcomes"][0]["last"]["mean"] == found[1]["outcomes"][0]["last"]["mean"]
    more = 2 * ckks.FRESH + 2 * 8 - 4 * 7850  # a head of 7850 numbers, no encoder; a factor and a fingerprint
    assert found[1]["bytes_up"] == found[0]["bytes_up"] + 2 * 4 * more  # rounds, clients
    with pytest.raises(SystemExit):
        main(["run", "pfedhn", *tiny, "-gr", "2", "--encrypt", "ckks", "--out", str(tmp_path / "refused")])
    assert "pFedHN cannot be encrypted" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
