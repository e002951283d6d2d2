"""Export a personal model for use without Coterie: ONNX, a torch program, TorchScript, weights, or peft's adapter."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.core.data import is_pixels
from coterie.core.errors import CoterieError, unknown
from coterie.core.packing import Inputs
from coterie.core.version import VERSION
from coterie.models.personal import MergedNetwork, OneNetwork, PersonalModel
from coterie.models.samples import probe
from coterie.personal.predict_script import ENDING, predict_script
from coterie.runs.describe import described_task
from coterie.runs.disk import whole
from coterie.runs.folder import ODD
from coterie.runs.stored_run import StoredRun
from coterie.runs.tensor_files import packed

OPSET = 18  # of ONNX
INPUT = "samples"
FORMAT = 1  # of the description in the files


def export(
    run: StoredRun, client: int | str, form: str, out: str | Path | None = None, merge: bool = False
) -> list[Path]:
    """Write the model of a client in one of FORMS, and return the files.

    merge: fold adapters (LoRA) into the weights that they adapt.
    """
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    ending, write = FORMS[form]
    number = run.client_number(client)
    path = Path(out) if out is not None else Path(f"client-{file_name(run.client_name(number))}{ending}")
    if ending and path.suffix != ending:
        raise CoterieError(f"{path}: the file name for {form} must end in {ending}")
    for file in (path, companion(path)):
        if file.exists():
            raise CoterieError(f"{file} exists already; name another file with --out, or remove it")
    model = run.personal_model(number)
    if form == "peft" and merge:
        raise CoterieError("peft's format has the adapter only, which merging would remove; leave out --merge")
    if form != "peft":  # which writes what is trained
        model = (model.merged() if merge else model).requires_grad_(False)
    return write(model, about(run, model), path)


def file_name(client: str) -> str:
    """A client's name as part of a file name."""
    return re.sub(r"[^\w.-]+", "-", client).strip(".-") or "-"


def about(run: StoredRun, model: PersonalModel) -> dict[str, Any]:
    """A description for users of the file."""
    info = model.info
    return {
        "format": FORMAT,
        "coterie": VERSION,
        "method": run.method.title,
        "client": info.client,
        "client_name": info.client_name,
        "data": info.data,
        "input": None
        if info.transform.inputs
        else {"name": INPUT, "shape": ["batch", *info.shape], "dtype": run.section("data")["dtype"]},
        "inputs": [asdict(one) for one in info.transform.inputs],
        "padding": info.transform.padding,
        "columns": [asdict(column) for column in info.transform.columns],
        "task": described_task(model.task),
        "output": {"name": output_name(model), "shape": ["batch", *output_shape(model)], "meaning": meaning(model)},
        "classes": info.class_names,
        "normalisation": {
            "scaled": is_pixels(info.shape, info.dtype),
            "mean": info.transform.mean,
            "std": info.transform.std,
            "axis": info.transform.axis,
        },
        "network": {
            "name": run.config["network"]["name"],
            "args": run.config["network"].get("args", {}),
            "encoder": str(run.model.encoder),
            "head": str(run.model.head),
        },
        "one_network": isinstance(model, OneNetwork | MergedNetwork),
    }


def output_name(model: PersonalModel) -> str:
    return "logits" if model.task.class_axis is not None or model.task.name == "multi-label" else "outputs"


def output_shape(model: PersonalModel) -> list[int]:
    with torch.no_grad():
        return list(model(probe(model.info)).shape[1:])


def meaning(model: PersonalModel) -> str:
    axis = model.task.class_axis
    if axis is not None:
        return "logits; softmax makes probabilities" if axis == 1 else f"logits; softmax along axis {axis}"
    words = {"regression": "numbers in the units of the labels", "multi-label": "logits; sigmoid makes probabilities"}
    return words.get(model.task.name, f"outputs of the task {model.task.name}")


def write_torch(model: PersonalModel, description: dict[str, Any], path: Path) -> list[Path]:
    program = exported(model, probe(model.info))
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={"about.json": json.dumps(description)})
    return [write_file(path, content.getvalue())]


def write_onnx(model: PersonalModel, description: dict[str, Any], path: Path) -> list[Path]:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise CoterieError("to write ONNX, install it: pip install 'coterie[onnx]'") from None
    x = probe(model.info)
    names = [INPUT] if isinstance(x, Tensor) else list(x)
    with quiet():
        program = exported(model, x).run_decompositions({torch.ops.aten.cdist.default: distances})
        made = torch.onnx.export(
            program, (x,), dynamo=True, opset_version=OPSET, verbose=False, input_names=names,
            output_names=[output_name(model)],
            dynamic_shapes=({0: "batch"} if isinstance(x, Tensor) else {name: {0: "batch"} for name in x},),
        )  # fmt: skip
    assert made is not None
    made.model.metadata_props["about"] = json.dumps(description)
    if not isinstance(x, Tensor):  # the script reads one input
        return [write_file(path, made.model_proto.SerializeToString())]
    text = predict_script(path.stem)
    return [write_file(path, made.model_proto.SerializeToString()), write_file(companion(path), text.encode())]


def write_torchscript(model: PersonalModel, description: dict[str, Any], path: Path) -> list[Path]:
    """Write a TorchScript program, for C++ and other places that torch.export does not reach."""
    x = probe(model.info)
    if not isinstance(x, Tensor):
        raise CoterieError("a TorchScript program takes one input, this network several; use --to torch or onnx")
    content = io.BytesIO()
    with quiet(), torch.no_grad():
        trace: Any = torch.jit.trace
        traced = trace(exported(model, x).module(), (x,), check_trace=False)
        for samples in (x[:1], torch.cat([x, x, x[:1]])):  # a trace may have kept the number of samples
            if not torch.allclose(traced(samples), model(samples), rtol=1e-4, atol=1e-5):
                raise CoterieError("TorchScript computes something else for this network; use --to torch or onnx")
        torch.jit.save(traced, content, _extra_files={"about.json": json.dumps(description)})
    return [write_file(path, content.getvalue())]


def write_state_dict(model: PersonalModel, description: dict[str, Any], path: Path) -> list[Path]:
    """Write the weights for `load_state_dict` of the user's own network, where the model is one network."""
    one = isinstance(model, OneNetwork | MergedNetwork)
    weights = model.network_state_dict() if one else model.weights()
    content = io.BytesIO()
    torch.save({name: t.detach().cpu().clone() for name, t in weights.items()}, content)
    description["use"] = (
        "weights under the names of the network: network.load_state_dict(torch.load(file)), of the prepared samples"
        if one
        else f"all tensors that a prediction of {description['method']} needs; use torch or onnx for the computation"
    )
    return [write_file(path, content.getvalue()), write_readme(path, description)]


def write_readme(path: Path, description: dict[str, Any]) -> Path:
    """Write the description next to weights, which cannot carry it."""
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    return write_file(companion(path), text.encode("utf-8", ODD))


def companion(path: Path) -> Path:
    """The file next to the exported one: the script of an ONNX model, the description of weights."""
    return path.with_name(f"{path.stem}{ENDING}" if path.suffix == ".onnx" else f"{path.name}.README.json")


def write_safetensors(model: PersonalModel, description: dict[str, Any], path: Path) -> list[Path]:
    """Write the weights, and the description in their metadata also as a separate file."""
    description["use"] = (
        "weights of one network: head(encoder(x)) of the prepared samples x"
        if isinstance(model, OneNetwork)
        else "weights of one network, with merged adapters: network(x) of the prepared samples x"
        if isinstance(model, MergedNetwork)
        else f"all tensors that a prediction of {description['method']} needs; use torch or onnx for the computation"
    )
    weights = {name: t.detach().contiguous().clone() for name, t in model.weights().items()}
    content = packed(weights, {"about": json.dumps(description)})
    return [write_file(path, content), write_readme(path, description)]


def exported(model: nn.Module, x: Inputs) -> torch.export.ExportedProgram:
    """The model as a graph that takes any number of samples."""
    batch = {0: torch.export.Dim("batch")}
    shapes = batch if isinstance(x, Tensor) else dict.fromkeys(x, batch)
    try:
        with torch.no_grad():
            return torch.export.export(model, (x,), dynamic_shapes=(shapes,))
    except Exception as error:  # a user's network may fail in any way
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CoterieError(
            f"torch.export cannot trace this network ({first}); --to safetensors writes its weights"
        ) from None


def write_peft(model: PersonalModel, description: dict[str, Any], path: Path) -> list[Path]:
    """Write the adapter in peft's format. Preprocessing is not a part of it."""
    return model.save_adapter(path)


FORMS: dict[str, tuple[str, Callable[[PersonalModel, dict[str, Any], Path], list[Path]]]] = {
    "onnx": (".onnx", write_onnx),
    "torch": (".pt2", write_torch),
    "torchscript": (".ts", write_torchscript),
    "safetensors": (".safetensors", write_safetensors),
    "state_dict": (".pt", write_state_dict),
    "peft": ("", write_peft),
}


def distances(a: Tensor, b: Tensor, p: float = 2.0, mode: int | None = None) -> Tensor:
    """torch.cdist as operations that ONNX supports: (B, d), (n, d) -> (B, n)."""
    return (a[:, None] - b[None]).square().sum(2).sqrt()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch.onnx about optional packages and deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically; creates the folder if needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise CoterieError(f"{path} cannot be written: {error.strerror}") from None
    return path
