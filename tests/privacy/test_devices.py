"""Encrypted messages between a server that has the public key only and devices that have the secret one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.deploy.remote import Remote
from coterie.execution import Looped
from coterie.federation import Settings, federate
from coterie.privacy.encryption import Encrypted
from coterie.privacy.keys import CkksKeys, new_keys
from tests import direct, toy

pytest.importorskip("tenseal")


@pytest.mark.parametrize("name", ["fedpac", "hypcluster"])
def test_through_bytes(name: str, tmp_path: Path) -> None:
    method, model, data = toy.method(name), toy.model(torch.float32), toy.toy()
    keys, settings = new_keys(), Settings(rounds=2, join_ratio=0.6, seed=7)
    ours = Encrypted(inner=method, keys=CkksKeys(keys.public))
    theirs = Encrypted(inner=method, keys=keys)
    agreement, there = (direct.agreement(m, model, data) for m in (ours, theirs))
    assert agreement.digest == there.digest
    transport = direct.Direct(direct.devices(there, data, tmp_path))
    server, history = federate(Remote(agreement, direct.census(data), transport, direct.TIMEOUTS), settings)
    assert not transport.refused
    with pytest.raises(CoterieError, match="public key only"):
        ours.reveal(server)
    plain, measured = federate(Looped(method, model, data, 7, processes=1), settings)
    assert toy.distance(tree.flatten(plain), tree.flatten(theirs.reveal(server))) < 1e-4
    for a, b in zip(measured, history, strict=True):
        assert b.scores
        assert all(torch.equal(a.scores[point].weighted, found.weighted) for point, found in b.scores.items())


def test_what_all_are_sent_alike_is_one_part(tmp_path: Path) -> None:
    """The encoder's ciphertexts travel once, a head to its client."""
    agreement = direct.agreement(Encrypted(inner=toy.method("fedpac"), keys=new_keys()), toy.model(), toy.toy())
    shared = agreement.templates.shared
    assert "encoder.ciphertexts" in shared
    assert "head.ciphertexts" not in shared
