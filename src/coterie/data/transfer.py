"""Download a file: resumed where it was interrupted, verified, and never half-written under its own name."""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coterie.core.errors import CoterieError
from coterie.core.version import VERSION

BLOCK = 2**18  # bytes read at a time
TIMEOUT = 30.0  # seconds without data
ATTEMPTS = 5  # in a row without any data

Show = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all if known


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to web addresses, but not from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme not in ("https", urlsplit(req.full_url).scheme):
            raise CoterieError(f"{req.full_url}: redirects to {newurl}, which is not encrypted; use --from")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def opener() -> urllib.request.OpenerDirector:
    """Opens http and https only; not files, which `urllib` would also take as URLs."""
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        Redirects(),
    ):
        made.add_handler(handler)
    return made


def download(url: str, path: Path, checksum: str, show: Show, timeout: float = TIMEOUT) -> str:
    """Download a file to `path`; returns its checksum, such as sha256:1f0a...

    checksum: expected, or empty if unknown. An interrupted download leaves `path` with .part, and goes on from there.
    """
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    idle = 0
    while True:
        before = size(part)
        problem = receive(url, part, show, timeout)
        if problem is None:
            break
        idle = idle + 1 if size(part) <= before else 0
        if idle >= ATTEMPTS or size(part) == 0:
            raise CoterieError(
                f"{url}: {problem} after {size(part):,} bytes; the same command resumes it, --from URL takes a mirror"
            )
    found = digest(part, checksum.partition(":")[0] or "sha256")
    if checksum and found != checksum:
        part.unlink()
        raise CoterieError(f"{url}: wrong checksum {found}, expected {checksum}; the download was deleted")
    os.replace(part, path)
    validator_of(part).unlink(missing_ok=True)
    return found


def receive(url: str, part: Path, show: Show, timeout: float) -> str | None:
    """Append to a partial download. None: complete; else why it is not."""
    start = size(part)
    headers = {"User-Agent": f"coterie/{VERSION}", "Accept-Encoding": "identity"}
    if start and (validator := read_validator(part, url)):
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the opener takes http and https only
        with opener().open(request, timeout=timeout) as response:
            resumed = response.status == 206 and continues(response.headers.get("Content-Range"), start)
            if response.status == 206 and not resumed:
                part.unlink()
                return receive(url, part, show, timeout)
            start = start if resumed else 0
            length = response.headers.get("Content-Length")
            total = start + int(length) if length and length.isdigit() else None
            check_space(part.parent, (total or 0) - start, url)
            write_validator(part, url, response.headers.get("ETag") or response.headers.get("Last-Modified") or "")
            with part.open("ab" if resumed else "wb") as file:
                while block := response.read1(BLOCK):  # what has arrived; `read` would lose it in a timeout
                    file.write(block)
                    show(part.stem, file.tell(), total)
        return None if total is None or size(part) == total else "the connection was closed early"
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # nothing after what is there: not the same file, so start over
            part.unlink()
            return receive(url, part, show, timeout)
        raise CoterieError(
            f"{url}: the server answers {error.code} {error.reason}; --from URL takes a mirror"
        ) from None
    except TimeoutError:
        return f"no data for {timeout:g} seconds"
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return f"no connection in {timeout:g} seconds"
        raise CoterieError(f"{url}: cannot be reached ({error.reason}); --from URL takes a mirror") from None
    except (http.client.HTTPException, ConnectionError) as error:
        return f"the connection broke ({type(error).__name__})"
    except ValueError as error:
        raise CoterieError(f"{url}: not a web address ({error})") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CoterieError(f"{part.parent}: no space left after {size(part):,} bytes") from None
        raise CoterieError(f"{part}: cannot be written ({error.strerror})") from None


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def continues(content_range: str | None, start: int) -> bool:
    """Whether an answer such as `bytes 500-999/1000` starts where a partial download ends."""
    return content_range is not None and content_range.strip().startswith(f"bytes {start}-")


def check_space(folder: Path, needed: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CoterieError(f"{folder}: {what} needs {needed:,} bytes, {free:,} are free")


def validator_of(part: Path) -> Path:
    """The file that records the source and version of a partial download."""
    return part.with_name(f"{part.name}.json")


def write_validator(part: Path, url: str, version: str) -> None:
    validator_of(part).write_text(json.dumps({"url": url, "version": version}), encoding="utf-8")


def read_validator(part: Path, url: str) -> str:
    """The version of a partial download; empty if it is unknown, or from another address."""
    try:
        content = json.loads(validator_of(part).read_text(encoding="utf-8"))
        version = str(content["version"]) if content["url"] == url else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return "" if version.startswith("W/") else version  # a weak ETag does not promise equal bytes


def digest(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"
