"""TensorBoard: event files in RUN/tensorboard, written synchronously so that a full disk is noticed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from coterie.runs.disk import open_inside, subfolder
from coterie.runs.trackers.tracker import Tracker, Values

STRING = 7  # TensorFlow's DT_STRING


class TensorBoard(Tracker):
    title: ClassVar[str] = "TensorBoard"

    def __init__(self) -> None:
        super().__init__()
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.event, self.summary, self.writer_of = event_pb2, summary_pb2, RecordWriter
        self.file: Any = None

    def open(self, folder: Path, config: Mapping[str, Any], mark: str | None, rounds: int) -> str:
        inside = subfolder(folder, "tensorboard", make=True)
        number = len(list(inside.iterdir()))  # readers sort by name
        self.file = open_inside(inside, f"events.out.tfevents.{number:06}.coterie", "xb")
        self.writer = self.writer_of(self.file)
        self._write(0, file_version="brain.Event:2")
        if mark:  # readers discard what was logged from this step on
            start = self.event.SessionLog(status=self.event.SessionLog.START)
            self._write(rounds + 1, session_log=start)
        else:
            self._write(0, summary=self._text("config", json.dumps(config, indent=2, ensure_ascii=False)))
        self.file.flush()
        return "tensorboard"

    def log(self, step: int, values: Values) -> None:
        made = [self.summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=self.summary.Summary(value=made))
        self.file.flush()

    def keep(self, files: Sequence[Path]) -> None:
        """TensorBoard has no artifacts."""

    def close(self, step: int, outcome: Values | None) -> None:
        if outcome:
            self.log(step, outcome)
        if self.file:
            self.file.close()

    def _write(self, step: int, **content: Any) -> None:
        self.writer.write(self.event.Event(wall_time=time.time(), step=step, **content).SerializeToString())

    def _text(self, name: str, text: str) -> Any:
        """For the text plugin, which shows Markdown: four spaces mark code."""
        code = "\n".join(f"    {line}" for line in text.splitlines())
        value = self.summary.Summary.Value(tag=f"{name}/text_summary")
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = STRING
        value.tensor.string_val.append(code.encode())
        value.tensor.tensor_shape.dim.add(size=1)
        return self.summary.Summary(value=[value])
