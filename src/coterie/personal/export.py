"""A personal model for programs that know nothing of Coterie: ONNX, a program of plain torch, or weights."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from coterie.core.errors import CoterieError, unknown
from coterie.federation.folder import ODD
from coterie.personal.run import Run
from coterie.personal.standalone import OneNetwork, Whole, exported, probe, standalone

OPSET = 18  # of ONNX
INPUT, OUTPUT = "samples", "logits"


def export(run: Run, client: int, form: str, out: str | Path | None = None) -> list[Path]:
    """Write the model of a client in one of FORMS; the files that were written."""
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    ending, write = FORMS[form]
    path = Path(out) if out is not None else Path(f"client-{client}{ending}")
    if path.suffix != ending:
        raise CoterieError(f"{path}: the name of a model for {form} must end in {ending}")
    if path.exists():
        raise CoterieError(f"{path} exists already; name another file with --out, or remove it")
    module = standalone(run.personal_model(client), run.shape, run.dtype)
    return write(module, run, client, path)


def about(run: Run, client: int, module: OneNetwork | Whole) -> dict[str, Any]:
    """What a user of the file has to know."""
    told = run.about["transform"]
    return {
        "method": run.method.title,
        "client": client,
        "data": run.about["name"],
        "input": {"name": INPUT, "shape": ["batch", *run.shape], "dtype": run.about["dtype"]},
        "output": {"name": OUTPUT, "shape": ["batch", run.classes], "meaning": "logits; softmax makes probabilities"},
        "classes": run.class_names,
        "normalisation": {"scaled": run.dtype == torch.uint8, "mean": told["mean"], "std": told["std"]},
        "network": {
            "name": run.config["network"]["name"],
            "encoder": str(run.model.encoder),
            "head": str(run.model.head),
        },
        "one_network": isinstance(module, OneNetwork),
    }


def write_torch(module: OneNetwork | Whole, run: Run, client: int, path: Path) -> list[Path]:
    program, told = exported(module, probe(run.shape, run.dtype)), json.dumps(about(run, client, module))
    with whole(path) as part:
        torch.export.save(program, part, extra_files={"about.json": told})
    return [path]


def write_onnx(module: OneNetwork | Whole, run: Run, client: int, path: Path) -> list[Path]:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise CoterieError("to write ONNX, install it: pip install 'coterie[onnx]'") from None
    x = probe(run.shape, run.dtype)
    with quiet():
        program = exported(module, x).run_decompositions({torch.ops.aten.cdist.default: distances})
        made = torch.onnx.export(
            program, (x,), dynamo=True, opset_version=OPSET, verbose=False, input_names=[INPUT], output_names=[OUTPUT],
            dynamic_shapes=({0: "batch"},),
        )  # fmt: skip
    assert made is not None
    made.model.metadata_props["about"] = json.dumps(about(run, client, module))
    with whole(path) as part:
        made.save(part, external_data=False)
    return [path]


def write_safetensors(module: OneNetwork | Whole, run: Run, client: int, path: Path) -> list[Path]:
    """The weights, and a file that says what they are of."""
    told = about(run, client, module)
    told["use"] = (
        "weights of one network: head(encoder(x)) of the normalised samples x"
        if isinstance(module, OneNetwork)
        else f"all that a prediction of {run.method.title} is made from; the forms torch and onnx hold how, too"
    )
    readme = path.with_suffix(".README.json")
    with whole(path) as part, whole(readme) as beside:
        part.write_bytes(save({name: t.detach().contiguous().clone() for name, t in weights(module).items()}))
        beside.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors=ODD)
    return [path, readme]


def weights(module: OneNetwork | Whole) -> dict[str, Tensor]:
    return module.state_dict() if isinstance(module, OneNetwork) else module.held()


FORMS: dict[str, tuple[str, Callable[[OneNetwork | Whole, Run, int, Path], list[Path]]]] = {
    "onnx": (".onnx", write_onnx),
    "torch": (".pt2", write_torch),
    "safetensors": (".safetensors", write_safetensors),
}


def distances(a: Tensor, b: Tensor, p: float = 2.0, mode: int | None = None) -> Tensor:
    """torch.cdist in operations that ONNX has: (B, d), (n, d) -> (B, n)."""
    return (a[:, None] - b[None]).square().sum(2).sqrt()


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch.onnx tells of packages that are not needed here, and of its own future."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, of the same ending, that takes the place of this one when all went well."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
            part = Path(folder) / path.name
            yield part
            os.replace(part, path)
    except (OSError, RuntimeError) as error:
        raise CoterieError(f"{path}: cannot be written ({error})") from None
